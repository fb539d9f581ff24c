"""Opens a checkpoint of any known form: a file, an index of files, a directory, or a state dict in memory.

The safetensors format is a length, a JSON header with types, shapes and offsets, and the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.checkpoint import distributed, torch_file
from schedc_runtime.checkpoint.pickled import unique
from schedc_runtime.checkpoint.stored import FORMS, InFile, InMemory, Stored, inside_file, reading, refused
from schedc_runtime.errors import MaterializeError

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
}  # fmt: skip
_MOST = 100_000_000
"""Bytes that a header may have, as in the format's own reader."""


def safetensors_in(path: Path) -> dict[str, InFile]:
    """The tensors of a safetensors file by name. Reads its header only, and checks it whole.

    The tensors cover the bytes behind the header once, without gaps. Raises `MaterializeError` for any other file.
    """
    with reading(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MOST, size - 8):
                raise refused(path, "it is no safetensors file, or it was not written to its end")
            header = _header(file.read(length))
        stored = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
        _check_cover(path, stored, 8 + length, size)
        return stored


def _header(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise ValueError("the header does not begin with {")
    header: dict[str, Any] = json.loads(text.decode("utf-8"), object_pairs_hook=table, parse_constant=_no_number)
    notes = header.pop("__metadata__", None)
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise ValueError("__metadata__ is no table of texts")
    return header


def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of a JSON object. Raises `ValueError` for a name that is there twice, or is no text in UTF-8."""
    for text in (text for pair in pairs for text in pair if isinstance(text, str)):
        text.encode("utf-8")
    return unique(pairs)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _stored(path: Path, name: str, entry: Any, begin: int) -> InFile:
    """A tensor as its entry says. begin: the first byte behind the header."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    kind, shape, span = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(kind, str) or kind not in _TYPES:
        raise refused(path, f"its type {kind} is not known; convert it before loading", name)
    if shape is None or span is None or len(span) != 2:
        raise refused(path, "its shape or its data_offsets are missing, or no sizes", name)
    if span[1] - span[0] != prod(shape) * _TYPES[kind].itemsize or prod(filter(None, shape)) >= 1 << 63:
        raise refused(path, f"{kind} {shape} does not fill the bytes {span[0]} to {span[1]}", name)
    return InFile(str(path), begin + span[0], tuple(shape), _TYPES[kind], name)


def _sizes(value: Any) -> list[int] | None:
    valid = isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)
    return value if valid else None


def _check_cover(path: Path, stored: dict[str, InFile], end: int, size: int) -> None:
    """Refuse overlaps, gaps, and bytes that are missing or left. end: the first byte behind the header."""
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise refused(path, f"it begins at byte {tensor.offset}, and the one before it ends at {end}", name)
        end += tensor.nbytes
    if end != size:
        raise refused(path, f"its tensors end at byte {end}, and the file at {size}")


_INDEX = ".index.json"
_IN_DIRECTORY = (
    "model.safetensors.index.json", "model.safetensors",
    "pytorch_model.bin.index.json", "pytorch_model.bin", distributed.METADATA,
)  # fmt: skip
"""What a directory is searched for, in this order."""


def open_checkpoint(source: str | os.PathLike[str] | Mapping[str, Tensor]) -> Mapping[str, Stored]:
    """The tensors of a checkpoint by name, each of its own shape, none of them read yet.

    Raises `MaterializeError` for a file that is not there, or of no known form.
    """
    if isinstance(source, Mapping):
        return {name: InMemory(value) for name, value in source.items()}
    path = Path(source)
    if path.is_dir():
        known = next((path / name for name in _IN_DIRECTORY if (path / name).is_file()), None)
        if known is None:
            raise MaterializeError(f"no checkpoint in {path}", f"known are {FORMS}")
        path = known
    if not path.is_file():
        raise MaterializeError(f"there is no checkpoint {path}", f"give the path of {FORMS}")
    with reading(path):
        return _open_file(path)


def _open_file(path: Path) -> Mapping[str, Stored]:
    if path.name == distributed.METADATA:
        return distributed.stored_in(path.parent)
    if not path.name.endswith(_INDEX):
        return _reader(path)(path)
    placed = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=table)["weight_map"]
    names = {name: inside_file(path.parent, name) for name in sorted(set(placed.values()))}
    if lost := sorted(str(each) for each in names.values() if not each.is_file()):
        raise refused(path, f"there is no {lost[0]}, which it names")
    files = {name: _reader(each)(each) for name, each in names.items()}
    if lost := sorted(name for name, file in placed.items() if name not in files[file]):
        raise refused(names[placed[lost[0]]], f"it is not there, where {path.name} has it", lost[0])
    return {name: files[file][name] for name, file in placed.items()}


def _reader(path: Path) -> Callable[[Path], Mapping[str, Stored]]:
    return safetensors_in if path.suffix == ".safetensors" else torch_file.stored_in
