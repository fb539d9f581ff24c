"""Counts what a rank holds of its microbatches behind every row of its stream, and predicts it by the compiler's curve.

`benchmarks/offload.py` runs this with ``--bits``. Counted are storages: what autograd has saved, what the runtime
keeps beside it, and the gradients that wait for W. A storage counts once for each stage and microbatch, for as long as
a weak reference finds it. The batch, parameters, buffers, and the flags that layers keep until the end of the step are
of no microbatch and do not count.

A row that runs inside a cell counts with that cell. A gradient is sent ahead of the weight gradients. Waits and JOINs
for the second op of a pair run behind its first op.

The prediction takes three numbers of each stage and microbatch from a step without offloads: bytes behind F, R and I.
What moves is the sum of the storages that left. All else follows from the program: the order of cells, and the places
of STARTs and JOINs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from schedc.ir.arrays import Floats, Int64
from schedc.ir.ops import OpKind
from schedc.ir.program import InstructionKind, Program, computation
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.works import FACTS, WorkKind
from schedc.step.dependencies import Dependencies
from schedc.step.memory import curve, measure_memory, memory_changes, without
from schedc.step.program.insert_works import placed_in
from schedc_runtime.execute import executor
from schedc_runtime.execute.executor import Interval
from schedc_runtime.measure.held_bytes import alive, runtime_tensors
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.offload.microbatch import MicrobatchOffload
from schedc_runtime.stage.stage import Stage
from schedc_runtime.stage.weight_work import PendingWork

Slot = tuple[int, int]
"""A stage and a microbatch."""


@dataclass
class Counter:
    """Counts the storages of one rank's stages while a step runs. batch: storages that are of no microbatch."""

    program: Program
    stages: Sequence[Stage]
    batch: frozenset[int] = frozenset()
    rows: dict[int, dict[Slot, int]] = field(default_factory=dict)
    """By row of the program: bytes of each slot behind it."""
    inside: dict[int, int] = field(default_factory=dict)
    """By row: the most bytes of the rank behind any micro-step of it."""
    moved: dict[Slot, int] = field(default_factory=dict)
    """Bytes that have left."""
    _begun: int = -1
    """The last row of which a step has run."""
    _saved: dict[Slot, dict[int, StorageWeakRef]] = field(default_factory=dict)
    """Storages that autograd has saved, and storages that returned."""

    @contextmanager
    def watching(self) -> Iterator[Counter]:
        """Count behind every step of the steps inside, which must be traced."""
        for stage in self.stages:
            stage.recomputation.active = True  # a recorder knows what is saved

        def counted(row: int, *rest: Any) -> Interval:
            self._count(row)
            return Interval(row, *rest)

        with patch.object(executor, "Interval", counted):
            yield self

    def _count(self, row: int) -> None:
        held = {}
        for stage in self.stages:
            flags = [flag for _, layer in moe_layers(stage.module) for flag in layer.planner.flags.values()]
            standing = (*stage.module.parameters(), *stage.module.buffers(), *flags)
            own = {x.untyped_storage()._cdata for x in standing}
            self._follow(stage)
            for slot in [slot for slot in self._saved if slot[0] == stage.index]:
                held[slot] = self._bytes(stage, slot, own | self.batch)
        self.inside[row] = max(self.inside.get(row, 0), sum(held.values()))
        self._begun = max(self._begun, row)
        if row < self._begun and row not in self.rows and self.program.kind[row] > InstructionKind.CELL:
            return  # inside a later cell
        for behind in [row, *(other for other in self.rows if other > row)]:
            self.rows[behind] = held

    def _follow(self, stage: Stage) -> None:
        """Take references to what microbatches in flight have saved, and to what has come back."""
        for microbatch in {*stage._states, *stage.kept}:
            saved = self._saved.setdefault((stage.index, microbatch), {})
            recorder = getattr(stage._states.get(microbatch), "recorder", None)
            for storages in recorder.saved.values() if recorder is not None else ():
                saved |= {weak.cdata: weak for weak in storages.values()}
        for microbatch, boxes in stage.offload._in_flight.items() if stage.offload is not None else ():
            saved = self._saved.setdefault((stage.index, microbatch), {})
            self._moving(boxes, (stage.index, microbatch), saved)

    def _moving(self, boxes: MicrobatchOffload, slot: Slot, saved: dict[int, StorageWeakRef]) -> None:
        if boxes._journeys and slot not in self.moved:
            self.moved[slot] = sum(journey.box.bytes for journey in boxes._journeys)
        for journey in boxes._journeys:
            if journey.box.flat is not None:
                weak = StorageWeakRef(journey.box.flat.untyped_storage())  # type: ignore[no-untyped-call]
                saved[weak.cdata] = weak

    def _bytes(self, stage: Stage, slot: Slot, seen: set[int]) -> int:
        """Bytes of the storages of a slot that are not in ``seen``; adds them to it."""
        saved = self._saved[slot]
        for number in [number for number, weak in saved.items() if weak.expired()]:  # type: ignore[no-untyped-call]
            del saved[number]
        sizes = {}
        for number, weak in saved.items():
            if (storage := alive(weak)) is not None:
                sizes[number] = storage.nbytes()
        for tensor in _kept(stage, slot[1]):
            sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return sum(size for number, size in sizes.items() if number not in seen)


def _kept(stage: Stage, microbatch: int) -> Iterator[Tensor]:
    """The tensors that a stage itself keeps of a microbatch: between segments, for an R, and for its W."""
    if (kept := stage.kept.get(microbatch)) is not None:
        yield from (x for x in kept.inputs if isinstance(x, Tensor))
    keys = [microbatch]
    if stage.is_cut:
        if (state := stage._states.get(microbatch)) is not None:
            yield from runtime_tensors(state)
        keys = [-1 - microbatch, *(stage._key(microbatch, node) for node in range(len(stage.graph.nodes)))]
    for key in keys:
        if (work := stage._split.pending.get(key)) is not None:
            yield from _waiting(work)


def _waiting(work: PendingWork) -> Iterator[Tensor]:
    """The gradients, and the saved tensors that have been read, of what waits for W."""
    yield from (later.grad for later in work.later)
    for product in (product for group in work.products for product in group):
        yield from (x for x in (product.grad, product.left, *product.saved.values()) if isinstance(x, Tensor))


@dataclass(frozen=True)
class Sizes:
    """Bytes of microbatches in a step without offloads: behind F, behind R, and behind I. Each [stages, M]."""

    forward: Floats
    restored: Floats
    pending: Floats

    @classmethod
    def of(cls, program: Program, rows: dict[int, dict[Slot, int]]) -> Sizes:
        """The sizes that a counter found on its rank."""
        schedule, row_of_op = computation(program)
        shape = schedule.stages, schedule.microbatches
        tables = {kind: np.zeros(shape) for kind in (OpKind.F, OpKind.R, OpKind.I)}
        for kind, row, stage, microbatch in zip(
            schedule.kind, row_of_op.tolist(), schedule.stage.tolist(), schedule.microbatch.tolist(), strict=True
        ):
            if kind in tables and row in rows:
                tables[OpKind(kind)][stage, microbatch] = rows[row].get((stage, microbatch), 0)
        return cls(tables[OpKind.F], tables[OpKind.R], tables[OpKind.I])

    def worst(self) -> Sizes:
        """The largest microbatch of each stage in the place of all."""
        return Sizes(*(np.broadcast_to(x.max(1, keepdims=True), x.shape) for x in vars(self).values()))


def predicted(program: Program, sizes: Sizes, moved: Floats) -> tuple[Floats, Floats]:
    """[n] bytes behind every row, and [P] the most inside any cell. moved: [stages, M] bytes of the works."""
    schedule, _ = computation(program)
    dependencies = Dependencies.of(schedule)
    again = recomputed_ops(schedule).astype(np.int8)
    changes = memory_changes(sizes.forward, sizes.pending, sizes.forward, sizes.restored)
    after, inside = curve(dependencies, changes[again, schedule.kind, schedule.stage, schedule.microbatch])
    whole = replace(measure_memory(schedule, dependencies=dependencies), memory=after, memory_inside=inside)
    placed = placed_in(program)
    works = placed.works
    moving = replace(placed, works=replace(works, bytes=moved[works.stage, works.microbatch]))
    memory = without(whole, moving)
    return _of_rows(program, after, memory.memory, moved), memory.peak_memory


def _of_rows(program: Program, plain: Floats, with_works: Floats, moved: Floats) -> Floats:
    """[n] the curve at every row. plain, with_works: [cells] without and with works. Both must agree at cells."""
    computes = program.kind <= InstructionKind.CELL
    cell: Int64 = np.cumsum(computes) - 1
    first = np.concatenate([[0], cell + 1])[program.rank_start[:-1]]
    base = np.where(cell >= first[program.rank], plain[np.maximum(cell, 0)], 0.0)
    factor = np.zeros((2, len(WorkKind)))
    for kind in WorkKind:
        factor[:, kind] = FACTS[kind].at_start, FACTS[kind].at_join
    change, at = np.zeros(len(program)), np.flatnonzero(program.work >= 0)
    works, work = program.works, program.work[at]
    join = (program.kind[at] == InstructionKind.JOIN).astype(int)
    change[at] = factor[join, works.kind[work]] * moved[works.stage[work], works.microbatch[work]]
    total = np.concatenate([[0.0], np.cumsum(change)])
    rows: Floats = base + total[1:] - total[program.rank_start[program.rank]]
    if not np.allclose(rows[computes], with_works):
        raise AssertionError("the rows do not follow the compiler's curve")
    return np.asarray(rows)


def judged(program: Program, rank: int, sizes: Sizes, counter: Counter) -> dict[str, Any]:
    """A rank's counts beside the prediction.

    rows: those counted. inside: rows that ran inside a later cell. unequal: the counted rows that differ from the
    prediction, with both numbers. peak_over_cap: the largest count behind a row over the compiler's peak. There all
    microbatches of a stage are as large as its largest, and as much of each stays as stays of any. inside_over_cap: the
    same behind every micro-step; inside a cell, values lie between segments that no backward needs.
    """
    shape = program.stages, program.microbatches
    moved = np.zeros(shape)
    for slot, count in counter.moved.items():
        moved[slot] = count
    curve_of, _ = predicted(program, sizes, moved)
    unequal = [
        (row, sum(held.values()), curve_of[row])
        for row, held in sorted(counter.rows.items())
        if sum(held.values()) != curve_of[row]
    ]
    stays = np.where(moved > 0, sizes.forward - moved, 0.0).max(1, keepdims=True)
    worst = sizes.worst()
    _, peak = predicted(program, worst, np.where(moved > 0, worst.forward - stays, 0.0))
    return {
        "rows": len(counter.rows), "inside": len(counter.inside) - len(counter.rows), "unequal": unequal,
        "peak_over_cap": max(sum(held.values()) for held in counter.rows.values()) / peak[rank],
        "inside_over_cap": max(counter.inside.values()) / peak[rank],
    }  # fmt: skip
