"""The header of a safetensors file, checked whole: a length, JSON with types, shapes and offsets, then the bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from schedc_runtime.saved.plain import json_of, refused, sizes

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "C64": 8,
}  # fmt: skip
"""Bytes of an element, by the format's names of types."""
_MOST = 100_000_000
"""Bytes that a header may have, as in the format's own reader."""


class FileSpan(NamedTuple):
    """Where a tensor of type ``dtype`` and of ``shape`` lies: bytes ``begin`` ..< ``end`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The length and the JSON that begin a file of ``tensors`` (name, type, shape), which lie one after the other."""
    entries: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_bytes(path: Path) -> int:
    """Bytes before the tensors of a safetensors file, whose header has been checked."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def spans_in(path: Path, start: int = 0, size: int = -1) -> dict[str, FileSpan]:
    """The tensors of a safetensors file by name. Reads the header only.

    start, size: bytes of a larger file in which it lies; by default all of it.

    The header is checked whole: the tensors cover the bytes behind it once, without gaps. Raises `MaterializeError` for
    any other file, and `ValueError` or `OSError` for a header that is no JSON, or a file that cannot be read.
    """
    with path.open("rb") as file:

        def read(begin: int, length: int) -> bytes:
            file.seek(begin)
            return file.read(length)

        return checked_spans(read, start, path.stat().st_size if size < 0 else size, path)


def checked_spans(read: Callable[[int, int], bytes], start: int, size: int, path: Path | str) -> dict[str, FileSpan]:
    """As `spans_in`, of what ``read`` gives: fn(begin, length) -> bytes. path: for errors."""
    length = int.from_bytes(read(start, 8), "little")
    if size < 8 or length > min(_MOST, size - 8):
        raise refused(path, "it is no safetensors file, or it was not written to its end")
    header = _header(read(start + 8, length))
    begin = start + 8 + length
    spans = {name: _span(path, name, entry, begin) for name, entry in header.items()}
    _check_cover(path, spans, begin, start + size)
    return spans


def _header(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise ValueError("the header does not begin with {")
    header: dict[str, Any] = json_of(text.decode("utf-8"))
    notes = header.pop("__metadata__", None)
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise ValueError("__metadata__ is no table of texts")
    return header


def _span(path: Path | str, name: str, entry: Any, begin: int) -> FileSpan:
    """A tensor as its entry says. begin: the first byte behind the header."""
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    kind, shape, span = fields.get("dtype"), sizes(fields.get("shape")), sizes(fields.get("data_offsets"))
    if not isinstance(kind, str) or kind not in ITEM_BYTES:
        raise refused(path, f"its type {kind} is not known; convert it before loading", name)
    if shape is None or span is None or len(span) != 2:
        raise refused(path, "its shape or its data_offsets are missing, or no sizes", name)
    if span[1] - span[0] != prod(shape) * ITEM_BYTES[kind] or prod(filter(None, shape)) >= 1 << 63:
        raise refused(path, f"{kind} {shape} does not fill the bytes {span[0]} to {span[1]}", name)
    return FileSpan(kind, tuple(shape), begin + span[0], begin + span[1])


def _check_cover(path: Path | str, spans: Mapping[str, FileSpan], end: int, size: int) -> None:
    """Refuse overlaps, gaps, and bytes that are missing or left. end: the first byte behind the header."""
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin != end:
            raise refused(path, f"it begins at byte {span.begin}, and the one before it ends at {end}", name)
        end = span.end
    if end != size:
        raise refused(path, f"its tensors end at byte {end}, and the file at {size}")
