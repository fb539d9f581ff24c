"""`Box`: one storage that a microbatch holds for its backward, and `BoxNote`, the note of a tensor in it.

    here --START of an offload--> leaving --JOIN--> away --START of a fetch--> coming --JOIN--> here

The graph of autograd refers to notes, and notes refer to boxes. A storage that leaves has no other reference and is
freed. What comes back lies in another storage, with the same bytes: the graph and its engine do not change.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from schedc_runtime.errors import StageError


class PlaceOfBox(Enum):
    """Where the bytes of a box are. The value is how errors say it."""

    HERE = "on the device"
    LEAVING = "on its way to the host"
    AWAY = "on the host"
    COMING = "on its way from the host"


class TensorLayout(NamedTuple):
    """How a tensor lies in its storage. size: [dimensions]. stride: [dimensions]. offset: elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of storage that the tensor covers."""
        distinct = math.prod(size for size, stride in zip(self.size, self.stride, strict=True) if stride)
        return distinct * self.dtype.itemsize if 0 not in self.size else 0


class Box:
    """One storage of one microbatch. It lives as long as a note refers to it.

    name: for errors, the stage and the segment that saved the first tensor of it.
    """

    __slots__ = ("__weakref__", "bytes", "flat", "layouts", "name", "place", "storage", "tensors", "versions")

    def __init__(self, name: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.name, self.bytes = name, storage.nbytes()
        self.storage = storage._cdata
        """The storage's number while the bytes have not left; then -1."""
        self.place = PlaceOfBox.HERE
        self.tensors: list[Tensor] = []
        """[saved tensors] detached, while the bytes have not left."""
        self.versions: list[int] = []
        """[saved tensors] version of each when it was saved; a later write raises it."""
        self.layouts: list[TensorLayout] = []
        """[saved tensors] once the bytes leave."""
        self.flat: Tensor | None = None
        """[bytes] uint8: the bytes that have come back, or are coming."""

    def add(self, tensor: Tensor) -> BoxNote:
        """The note for a tensor [...] of this storage that autograd saves."""
        self.tensors.append(tensor.detach())
        self.versions.append(tensor._version)
        return BoxNote(self, len(self.tensors) - 1)

    def value(self, index: int) -> Tensor:
        """The saved tensor [...] of that number. Raises `StageError` unless it is on the device."""
        if self.place is not PlaceOfBox.HERE:
            raise StageError(
                f"{self.name}: a saved tensor is read while it is {self.place.value}",
                "read saved tensors (hooks, retain_graph) on stages that move nothing, or before the offload starts",
            )
        if self.flat is None:
            return unwritten(self.tensors[index], self.versions[index], self.name)
        layout = self.layouts[index]
        flat = self.flat.untyped_storage()
        return _empty(layout.dtype, self.flat.device).set_(flat, layout.offset, layout.size, layout.stride)

    def source(self) -> Tensor:
        """[bytes] uint8: the storage as a copy reads it."""
        storage = self.tensors[0].untyped_storage()
        return _empty(torch.uint8, storage.device).set_(storage, 0, (self.bytes,), (1,))

    def check_unwritten(self) -> None:
        """Raise `StageError` if a tensor has been written to since it was saved."""
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            unwritten(tensor, version, self.name)

    @property
    def covered(self) -> int:
        """Bytes of the storage that the saved tensors cover, at most; tensors that overlap count twice."""
        return sum({layout: layout.bytes for layout in map(_layout, self.tensors)}.values())

    @property
    def holders(self) -> int:
        """How many others refer to the storage."""
        return max(0, _references(self.storage) - len(self.tensors) - _WRAPPER)

    def drop(self) -> StorageWeakRef:
        """Let go of the storage. The reference that is returned says whether it has been freed."""
        weak = StorageWeakRef(self.tensors[0].untyped_storage())  # type: ignore[no-untyped-call]
        self.layouts = [_layout(tensor) for tensor in self.tensors]
        self.tensors, self.versions, self.storage = [], [], -1
        return weak


class BoxNote(NamedTuple):
    """The note for a tensor of any shape that lies in a box, which may leave the device."""

    box: Box
    number: int

    def value(self) -> Tensor:
        return self.box.value(self.number)


class Shelf:
    """The boxes of one microbatch, by storage, for as long as the graph refers to them."""

    def __init__(self) -> None:
        self._boxes: dict[int, weakref.ref[Box]] = {}

    def box(self, name: str, tensor: Tensor) -> Box:
        """The box of the storage of a tensor [...]; a new one of that name if there is none."""
        number = tensor.untyped_storage()._cdata
        reference = self._boxes.get(number)
        box = None if reference is None else reference()
        if box is None or box.storage != number:
            box = Box(name, tensor)
            self._boxes[number] = weakref.ref(box)
        return box

    def boxes(self) -> list[Box]:
        """The boxes to which a note still refers, in the order of their first tensors."""
        return [box for reference in self._boxes.values() if (box := reference()) is not None]


def unwritten(tensor: Tensor, version: int, name: str = "") -> Tensor:
    """The tensor [...] itself. Raises `StageError` if it has been written to since it had ``version``."""
    if tensor._version != version:
        raise StageError(
            f"{name}: a tensor that the backward needs has been written to"
            if name else "a tensor that the backward needs has been written to",
            "write x = x + y rather than x += y behind what is recomputed or moved to the host",
        )  # fmt: skip
    return tensor


def values_of(items: Iterable[Any]) -> tuple[Any, ...]:
    """The items with the tensors of notes in place of the notes."""
    return tuple([item.value() if isinstance(item, BoxNote) else item for item in items])


def _layout(tensor: Tensor) -> TensorLayout:
    return TensorLayout(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _references(storage: int) -> int:
    """How many refer to the storage of that number; 0 where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(storage))


def _of_wrapper() -> int:
    """References that torch's own Python object of a storage has, beside those of tensors."""
    tensor = torch.empty(1)
    return _references(tensor.untyped_storage()._cdata) - 1


_WRAPPER = _of_wrapper()
