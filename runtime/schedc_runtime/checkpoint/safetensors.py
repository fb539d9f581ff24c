"""The safetensors format: a length, a JSON header with types, shapes and offsets, and the bytes."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch

from schedc_runtime.checkpoint.faults import reading, refused
from schedc_runtime.checkpoint.pickled import unique
from schedc_runtime.checkpoint.stored import InFile

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
}  # fmt: skip
_MOST = 100_000_000
"""Bytes that a header may have, as in the format's own reader."""


def stored_in(path: Path) -> dict[str, InFile]:
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
