"""Bytes that the backward of microbatches in flight keeps in memory, counted by storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from schedc_runtime.errors import StageError
from schedc_runtime.partition.structure import storage_of
from schedc_runtime.recompute.notes import TensorNote
from schedc_runtime.recompute.regions import NOTES, Recorder
from schedc_runtime.stage.in_flight import MicrobatchState
from schedc_runtime.stage.stage import Stage


@dataclass(frozen=True)
class Bytes:
    """Bytes held by one microbatch on a stage. A storage is counted once; parameters are not counted.

    saved: by segment, what autograd has saved.
    runtime: what the runtime holds besides: values between segments, leaves of segments, inputs of what will be
        recomputed, and the indexes that say where every row goes.
    restored: what has been recomputed, until the backward has used it up.
    """

    saved: dict[str, int]
    runtime: int
    restored: int = 0

    @property
    def total(self) -> int:
        """Bytes saved and held by the runtime, without those restored."""
        return sum(self.saved.values()) + self.runtime


def held(stage: Stage, microbatch: int) -> Bytes:
    """Bytes of a microbatch between its forward and its backward. Ahead of an R of the whole stage: its inputs only.

    The stage must recompute something, or count: ``stage.set_recomputation(Recompute(), count=True)``.
    """
    return _together([_held(stage, number) for number in stage.numbers(microbatch)])


def _held(stage: Stage, number: int) -> Bytes:
    """Bytes of a slice, or of a microbatch without slices."""
    if (kept := stage.kept.get(number)) is not None:
        return Bytes({}, _new((x.untyped_storage() for x in _tensors((kept.inputs, kept.target))), set()))
    state = stage._states.get(number)
    recorder: Recorder | None = stage.recomputation.counted if state is None else state.recorder
    if recorder is None:
        raise StageError(f"stage {stage.index} does not count", "stage.set_recomputation(Recompute(), count=True)")
    seen = {storage_of(tensor) for tensor in (*stage.module.parameters(), *stage.module.buffers())}
    names, _ = stage._node_names()
    saved = {}
    for node in sorted(recorder.saved):
        storages = [storage for weak in recorder.saved[node].values() if (storage := alive(weak)) is not None]
        saved[names.get(node, "stage")] = _new(storages, seen)
    restored, runtime = [*recorder.restored()], 0
    if state is not None and stage.is_cut:
        runtime = _new((x.untyped_storage() for x in runtime_tensors(state)), seen)
        restored += [] if state.recompute is None else state.recompute.restored
    return Bytes(saved, runtime, _new((x.untyped_storage() for x in _tensors(restored)), seen))


def _together(parts: Sequence[Bytes]) -> Bytes:
    """The bytes of all slices of a microbatch. A shared tensor, such as a batch, counts in each."""
    saved: dict[str, int] = {}
    for part in parts:
        saved = {name: saved.get(name, 0) + part.saved.get(name, 0) for name in {**saved, **part.saved}}
    return Bytes(saved, sum(part.runtime for part in parts), sum(part.restored for part in parts))


def runtime_tensors(state: MicrobatchState) -> Iterator[Tensor]:
    """The tensors, of any shape, to which the runtime itself refers."""
    yield from _tensors(list(state.values.values()))
    for done in state.done.values():
        yield from _tensors([leaf for leaves in getattr(done, "leaves", ()) for leaf in leaves])
        yield from _tensors(getattr(done, "route", None))
    if state.recorder is not None:
        yield from _tensors(state.recorder.decisions())
    if state.recompute is not None:
        yield from (note.tensor for note in _notes(state.recompute.held) if isinstance(note, TensorNote))


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in containers and in routes, which are frozen data that holds indexes."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            for field in fields(leaf):
                yield from _tensors(getattr(leaf, field.name))


def _notes(values: Any) -> list[Any]:
    return pytree.tree_leaves(values, is_leaf=lambda x: isinstance(x, NOTES))


def alive(weak: Any) -> UntypedStorage | None:
    """The storage of a weak reference; None if it has been freed."""
    if weak.expired():
        return None
    storage = UntypedStorage._new_with_weak_ptr(weak.cdata)
    return storage if isinstance(storage, UntypedStorage) else None


def _new(storages: Iterable[UntypedStorage], seen: set[int]) -> int:
    """Bytes of the storages that are not in ``seen``; adds them to it."""
    total = 0
    for storage in storages:
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
