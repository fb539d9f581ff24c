"""Copies the state of a rank into its two images in shared memory, in one pass over the tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.device.base import ComputeDevice
from schedc_runtime.device.cpu import CpuDevice
from schedc_runtime.keeper.images import TENSORS, Image
from schedc_runtime.keeper.places import Places
from schedc_runtime.trainers.box_file import FileLayout, HeldBox

_SPARE = 1 << 20
"""Bytes beyond what a state takes now: a description grows with the states of loaders."""


class _Layout(NamedTuple):
    """Where boxes lie in an image. key: tells it from others. tensors: bytes of the safetensors file.

    views: [boxes] memory for each. entries: of a manifest, by name. text: the same as JSON.
    """

    key: object
    tensors: int
    views: list[Tensor]
    entries: dict[str, Any]
    text: str


class BegunCopy(NamedTuple):
    """A state on its way into an image. number: of the image. views: [boxes] memory for each box.

    tensors: bytes of the safetensors file. text: the description.
    """

    number: int
    views: list[Tensor]
    tensors: int
    text: bytes


class ImageWriter:
    """The images of a rank. size: bytes that a state takes at most, as far as is known. device: copies to them."""

    def __init__(self, places: Places, rank: int, size: int, device: ComputeDevice | None = None) -> None:
        self._device = device or CpuDevice()
        self._paths = places.image_paths(rank)
        kept = [Image.opened(path) for path in self._paths]
        self.images = [
            image if image is not None and image.size >= size else Image.made(path, size + _SPARE)
            for path, image in zip(self._paths, kept, strict=True)
        ]
        self._memory: list[Tensor | None] = [None, None]
        self._layouts: list[_Layout | None] = [None, None]
        self._sequence = 0
        self.notes: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
        """fn(entries of a manifest by name) -> what else a description says."""
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
        """Copy a state into an image at once. facts: JSON beside ``tensors`` in its description."""
        begun = self.begin(number, boxes, facts)
        with torch.no_grad():
            torch._foreach_copy_(begun.views, [box.tensor for box in boxes])
        self.finish(begun, step, durable)

    def begin(self, number: int, boxes: Sequence[HeldBox], facts: Mapping[str, Any]) -> BegunCopy:
        """Empty an image, and make it ready for a state. Facts are taken now, tensors when they are copied."""
        layout = self._layout(number, boxes)
        told = _json({**facts, **self.notes(layout.entries)})
        text = f'{told[:-1]},"tensors":{layout.text}}}'.encode()
        if TENSORS + layout.tensors + len(text) > self.images[number].size:
            self._grow(number, TENSORS + layout.tensors + len(text))
            layout = self._layout(number, boxes)
        self.images[number].clear()
        return BegunCopy(number, layout.views, layout.tensors, text)

    def finish(self, begun: BegunCopy, step: int, durable: bool) -> None:
        """Say that an image holds the state of a step: all of its tensors were copied."""
        self._sequence += 1
        self.images[begun.number].finish(self._sequence, step, durable, begun.tensors, begun.text)

    def room(self, number: int, size: int) -> Image:
        """An image with room for ``size`` bytes of a file. Made anew if need be, and empty then."""
        if self.images[number].size < size:
            self._grow(number, size)
        return self.images[number]

    def close(self) -> None:
        """Give the mappings back."""
        for number, image in enumerate(self.images):
            self._unmap(number)
            image.close()

    def _map(self, number: int) -> None:
        self.images[number].reserve()
        memory = self._memory[number] = torch.frombuffer(self.images[number].mapped(), dtype=torch.uint8)
        self._device.lend(memory)

    def _unmap(self, number: int) -> None:
        if (memory := self._memory[number]) is not None:
            self._device.take_back(memory)
        self._memory[number] = self._layouts[number] = None

    def _grow(self, number: int, size: int) -> None:
        """Make an image larger, and empty. The other image stays as it is."""
        self._unmap(number)
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
        whole = self._memory[number]
        assert whole is not None
        self.images[number].clear()
        whole[TENSORS : TENSORS + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        views, begin = dict[int, Tensor](), TENSORS + len(header)
        for each in order:
            tensor = boxes[each].tensor
            views[each] = whole[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            begin += tensor.nbytes
        layout = self._layouts[number] = _Layout(
            key, tensors, [views[each] for each in range(len(boxes))], entries, _json(entries)
        )
        return layout


def state_size(boxes: Sequence[HeldBox]) -> int:
    """Bytes of an image of these boxes, with a description as long as is usual."""
    return TENSORS + sum(box.tensor.nbytes + 512 for box in boxes)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
