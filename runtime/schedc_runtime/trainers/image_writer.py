"""Copies the state of a rank into its two images in shared memory, in one pass over the tensors."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.keeper.images import TENSORS, Image
from schedc_runtime.keeper.places import Places
from schedc_runtime.trainers.box_file import FileLayout, HeldBox

_SPARE = 1 << 20
"""Bytes beyond what a state takes now: a description grows with the states of loaders."""


class _Layout(NamedTuple):
    """Where boxes lie in an image. key: tells it from others. tensors: bytes of the safetensors file.

    order: numbers of the boxes as they lie there. views: [boxes] memory, in this order.
    """

    key: object
    tensors: int
    order: list[int]
    views: list[Tensor]
    entries: dict[str, Any]


class ImageWriter:
    """The images of a rank. size: bytes that a state takes at most, as far as is known."""

    def __init__(self, places: Places, rank: int, size: int) -> None:
        self._paths = places.image_paths(rank)
        kept = [Image.opened(path) for path in self._paths]
        self.images = [
            image if image is not None and image.size >= size else Image.made(path, size + _SPARE)
            for path, image in zip(self._paths, kept, strict=True)
        ]
        self._memory: list[mmap.mmap | None] = [None, None]
        self._layouts: list[_Layout | None] = [None, None]
        self._sequence = 0
        for number in range(len(self.images)):
            self._map(number)

    @property
    def bytes(self) -> int:
        """Bytes of both images."""
        return sum(image.size for image in self.images)

    def step_of(self, number: int) -> int | None:
        """The step whose state an image holds."""
        header = self.images[number].header()
        return None if header is None else header.step

    def write(self, number: int, boxes: Sequence[HeldBox], step: int, durable: bool, facts: Mapping[str, Any]) -> None:
        """Copy a state into an image. facts: JSON beside ``tensors`` in its description."""
        image, layout = self.images[number], self._layout(number, boxes)
        image.clear()
        with torch.no_grad():
            torch._foreach_copy_(layout.views, [boxes[each].tensor for each in layout.order])
        text = _text(facts, layout.entries)
        if TENSORS + layout.tensors + len(text) > image.size:
            self._grow(number, TENSORS + layout.tensors + len(text))
            return self.write(number, boxes, step, durable, facts)
        self._sequence += 1
        image.finish(self._sequence, step, durable, layout.tensors, text)
        return None

    def close(self) -> None:
        """Give the mappings back."""
        self._layouts, self._memory = [None, None], [None, None]
        for image in self.images:
            image.close()

    def _map(self, number: int) -> None:
        self._memory[number] = self.images[number].mapped()
        self._layouts[number] = None

    def _grow(self, number: int, size: int) -> None:
        """Make an image larger, and empty. The other image stays as it is."""
        self.images[number].close()
        self.images[number] = Image.made(self._paths[number], size + _SPARE)
        self._map(number)

    def _layout(self, number: int, boxes: Sequence[HeldBox]) -> _Layout:
        """Where the boxes lie in an image, which is made larger if need be."""
        key = [(box.name, box.tensor.dtype, box.tensor.shape, box.offset) for box in boxes]
        layout = self._layouts[number]
        if layout is not None and layout.key == key:
            return layout
        header, order, entries = FileLayout.of(boxes)
        tensors = len(header) + sum(boxes[each].tensor.nbytes for each in order)
        if TENSORS + tensors > self.images[number].size:
            self._grow(number, TENSORS + tensors)
        memory = self._memory[number]
        assert memory is not None
        self.images[number].clear()
        memory[TENSORS : TENSORS + len(header)] = header
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        views, begin = [], TENSORS + len(header)
        for each in order:
            tensor = boxes[each].tensor
            views.append(whole[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            begin += tensor.nbytes
        layout = self._layouts[number] = _Layout(key, tensors, order, views, entries)
        return layout


def state_size(boxes: Sequence[HeldBox]) -> int:
    """Bytes of an image of these boxes, with a description as long as is usual."""
    return TENSORS + sum(box.tensor.nbytes + 512 for box in boxes)


def _text(facts: Mapping[str, Any], entries: Mapping[str, Any]) -> bytes:
    return json.dumps({**facts, "tensors": entries}, separators=(",", ":"), allow_nan=False).encode()
