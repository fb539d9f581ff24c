"""Lays boxes of a rank out as a safetensors file, in an image or straight on disk."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.checkpoint.stored import TYPE_NAMES
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.saved.safetensors import safetensors_header


class HeldBox(NamedTuple):
    """A tensor [...] of this rank, as a box of the tensor ``name`` with the whole ``shape``. offset: by dimension."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class FileLayout(NamedTuple):
    """A safetensors file of boxes. header: its first bytes. order: numbers of the boxes as they lie behind it.

    entries: by name the tensor as in a manifest.
    """

    header: bytes
    order: list[int]
    entries: dict[str, Any]

    @classmethod
    def of(cls, boxes: Sequence[HeldBox]) -> FileLayout:
        """The layout for ``boxes``: large elements first, so that each tensor lies at a multiple of its own."""
        order = sorted(range(len(boxes)), key=lambda each: -boxes[each].tensor.dtype.itemsize)
        keys, entries = _entries(boxes)
        listed = [(keys[each], _type_name(boxes[each]), tuple(boxes[each].tensor.shape)) for each in order]
        return cls(safetensors_header(listed), order, entries)


class BoxBytes:
    """The bytes of a file of boxes, of which only the part that is read is copied."""

    def __init__(self, boxes: Sequence[HeldBox], layout: FileLayout) -> None:
        self._tensors = [boxes[each].tensor for each in layout.order]
        self._header = layout.header
        sizes = [len(layout.header), *(tensor.nbytes for tensor in self._tensors)]
        self._ends = list(accumulate(sizes))
        self.length = self._ends[-1]
        self._number, self._open = 0, memoryview(layout.header)

    def read(self, begin: int, length: int) -> bytes:
        """Bytes ``begin`` ..< ``begin + length`` of the file."""
        pieces = []
        while length:
            number = bisect_right(self._ends, begin)
            whole = self._part(number)
            first = begin - (self._ends[number - 1] if number else 0)
            pieces.append(bytes(whole[first : first + length]))
            begin, length = begin + len(pieces[-1]), length - len(pieces[-1])
        return b"".join(pieces)

    def _part(self, number: int) -> memoryview:
        """The header, or a tensor as bytes on the CPU. The last one is kept: a tensor may have many pieces."""
        if number and number != self._number:
            flat = self._tensors[number - 1].detach().cpu().contiguous().view(-1)
            self._number, self._open = number, flat.view(torch.uint8).numpy().data
        return self._open if number else memoryview(self._header)


def _entries(boxes: Sequence[HeldBox]) -> tuple[list[str], dict[str, Any]]:
    """[boxes] their keys in the file, and by name the entry of a manifest."""
    keys, entries = [], dict[str, Any]()
    for box in boxes:
        entry = entries.setdefault(box.name, {"dtype": _type_name(box), "shape": list(box.shape), "boxes": []})
        key = f"{box.name}#{len(entry['boxes'])}" if entry["boxes"] else box.name
        entry["boxes"].append({"key": key, "offset": list(box.offset), "size": list(box.tensor.shape)})
        keys.append(key)
    return keys, entries


def _type_name(box: HeldBox) -> str:
    if box.tensor.dtype not in TYPE_NAMES:
        raise RuntimeFault(f"`{box.name}` is of the type {box.tensor.dtype}, which no checkpoint holds", "convert it")
    return TYPE_NAMES[box.tensor.dtype]
