"""The recorded construction of a model, as data: operations over storages, and which of them a tensor needs.

A tensor is a `View` of a storage. Views, ``detach``, ``.data`` and ``Parameter(t)`` share a storage and need no
operation. An operation knows the operations whose results it reads: the last writers of its storages. What a tensor
needs is then the ancestors of the last writer of its storage.

    empty   -> s0     normal_  (s0)     _to_copy (s0) -> s1      w = View(s1)
    op 0              op 1 reads 0      op 2 reads 1             needs 2, 1, 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class View(NamedTuple):
    """A tensor of a storage. size, stride, offset: in elements of ``dtype``. storage: its number on the tape."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor [size] over ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Captured(NamedTuple):
    """A real tensor among the arguments, by its number in `Tape.constants`."""

    number: int


@dataclass(frozen=True)
class Operation:
    """One recorded call.

    function: an operator, or a function that runs whole. args, kwargs: as called, with a `View` or `Captured` for each
    tensor. outputs: the views of the results on new storages, None for other results. reads: the operations with
    results among the arguments. random: draws random numbers. device: where the call asked for its result, or None.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[View | None, ...]
    reads: tuple[int, ...]
    random: bool
    device: torch.device | None = None

    @property
    def kind(self) -> str:
        """The name of the function, without overload."""
        return str(getattr(self.function, "_opname", getattr(self.function, "__name__", "")))


@dataclass
class Tape:
    """All operations so far. constants: real tensors [...] among the arguments, with the values of that time.

    device: where the tensors are meant to be; None leaves it to the pipeline.

    A storage has a number for good: the tape keeps weak references, so that no address is used twice.
    """

    device: torch.device | None = None
    operations: list[Operation] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _storages: list[StorageWeakRef] = field(default_factory=list)
    _writers: list[int | None] = field(default_factory=list)
    _captured: dict[int, list[int]] = field(default_factory=dict)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the storage of ``tensor``, of any shape, was seen here."""
        return tensor.untyped_storage()._cdata in self._numbers

    def view(self, tensor: Tensor) -> View:
        """``tensor``, of any shape on the meta device, as a view. A storage that is new here has no writer yet."""
        return View(
            self._number(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def adopt(self, tensor: Tensor) -> View:
        """``tensor``, of any shape on the meta device, as a view. A storage that was made elsewhere begins empty."""
        if self.knows(tensor):
            return self.view(tensor)
        view = self.view(tensor)
        elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        whole = View(view.storage, view.dtype, (elements,), (1,), 0)
        empty = torch.ops.aten.empty.memory_format
        options = {"dtype": tensor.dtype, "device": torch.device("meta")}
        self.append(Operation(empty, ([elements],), options, (whole,), (), random=False), [whole])
        return view

    def capture(self, tensor: Tensor) -> Captured:
        """A real tensor of any shape, as it is now."""
        self.constants.append(tensor.detach())
        number = len(self.constants) - 1
        self._captured.setdefault(tensor.untyped_storage()._cdata, []).append(number)
        return Captured(number)

    def release(self, tensor: Tensor) -> None:
        """The real ``tensor``, of any shape, is about to be written: keep a copy of what was captured of it."""
        for number in self._captured.pop(tensor.untyped_storage()._cdata, []):
            self.constants[number] = self.constants[number].clone()

    def reads(self, views: Iterable[View]) -> tuple[int, ...]:
        """The operations that wrote ``views`` last."""
        writers = {self._writers[view.storage] for view in views}
        return tuple(sorted(writer for writer in writers if writer is not None))

    def append(self, operation: Operation, written: Iterable[View]) -> None:
        """Add an operation, which writes ``written``."""
        self.operations.append(operation)
        for view in written:
            self._writers[view.storage] = len(self.operations) - 1

    def needs(self, view: View) -> list[int]:
        """The operations that make ``view``, in their order; [] for a storage that nobody wrote."""
        last = self._writers[view.storage]
        return [] if last is None else sorted(self._ancestors(last, set()))

    def owners(self, named: Iterable[tuple[str, View]]) -> dict[int, str]:
        """For each operation the first name that needs it."""
        seen: set[int] = set()
        owner: dict[int, str] = {}
        for name, view in named:
            if (last := self._writers[view.storage]) is not None:
                owner |= dict.fromkeys(self._ancestors(last, seen), name)
        return owner

    @property
    def alive(self) -> bool:
        """Whether a tensor of this construction still exists."""
        return any(not storage.expired() for storage in self._storages)  # type: ignore[no-untyped-call]

    def _ancestors(self, last: int, seen: set[int]) -> Iterator[int]:
        """``last`` and all operations behind its reads, without numbers in ``seen``. Adds each to ``seen``."""
        stack = [last]
        while stack:
            if (index := stack.pop()) not in seen:
                seen.add(index)
                yield index
                stack.extend(self.operations[index].reads)

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self._writers.append(None)
        return self._numbers[storage._cdata]


TAPES: list[Tape] = []
"""The recorded constructions whose tensors still exist."""


def tape_of(tensor: Tensor) -> Tape | None:
    """The tape that has seen the storage of ``tensor``, of any shape; None for a tensor made elsewhere."""
    return next((tape for tape in TAPES if tape.knows(tensor)), None)


def forget_dead() -> None:
    """Drop the tapes none of whose tensors exists any more."""
    TAPES[:] = [tape for tape in TAPES if tape.alive]
