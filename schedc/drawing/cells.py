"""The cells of a schedule as columns to draw: times, halves of pairs, idle gaps, memory and runs of a phase."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.drawing.beside import Beside
from schedc.ir.arrays import Floats, Int32, Int64, bincount, repeat
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.schedule import Schedule
from schedc.step.copy_runs import CopyRuns
from schedc.step.memory import Memory
from schedc.step.timeline import Timeline
from schedc.step.work_runs import WorkRuns

_USUAL = [max(1.0, len(FACTS[kind].takes_as_long_as)) for kind in OpKind]
"""[kinds] time of an op of each kind where none runs alone, in time units: 2 for B, else 1."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A step function: ``held[i]`` from ``times[i]`` until the next time.

    times: [steps] time units, ascending; equal times may follow each other. held: [steps] in the costs' unit of memory.
    """

    times: Floats
    held: Floats

    @property
    def peak(self) -> float:
        return float(self.held.max(initial=0.0))


@dataclass(frozen=True, eq=False)
class CellColumns:
    """The cells of a schedule at their times. Rank r has the cells rank_start[r] ..< rank_start[r + 1].

    first: [cells] row of the cell's op, or of the forward of a pair. second: [cells] row of a pair's backward, else -1.
    start, end: [cells] time units. middle: [cells] time at which the backward of a pair begins, else equal to ``end``.
    chunk: [ops] chunk, on its rank, of each op (not of each cell).
    inside: [cells] highest memory while the cell runs, in the costs' unit. after: [cells] memory from the end of the
    cell to the start of the next. makespan: time units. works: what moves beside the compute; None without any.
    copies: copies of experts that travel inside cells; None without any.
    """

    schedule: Schedule
    rank_start: Int64
    first: Int32
    second: Int32
    start: Floats
    middle: Floats
    end: Floats
    chunk: Int32
    inside: Floats
    after: Floats
    makespan: float
    works: WorkRuns | None = None
    copies: CopyRuns | None = None

    def __len__(self) -> int:
        return int(self.first.size)

    @cached_property
    def beside(self) -> Beside | None:
        """Works and copies on their lanes; None without any."""
        return Beside.of(self.works, self.copies)

    @cached_property
    def rank(self) -> Int64:
        """[cells] Rank of each cell."""
        return repeat(np.arange(self.schedule.ranks), np.diff(self.rank_start))

    def of_rank(self, rank: int) -> slice:
        return slice(int(self.rank_start[rank]), int(self.rank_start[rank + 1]))

    def gaps(self, rank: int) -> list[tuple[float, float]]:
        """(begin, end) of the idle intervals of a rank between time 0 and the makespan, in time units."""
        cells = self.of_rank(rank)
        starts = np.append(self.start[cells], self.makespan)
        ends = np.insert(self.end[cells], 0, 0.0)
        idle = starts - ends > 1e-9 * max(1.0, self.makespan)
        return [(float(a), float(b)) for a, b in zip(ends[idle], starts[idle], strict=True)]

    def curve(self, rank: int) -> Curve:
        """The memory of a rank: while a cell runs, the highest value before and inside it; then what it leaves."""
        cells = self.of_rank(rank)
        held = np.stack([self.held[cells], self.after[cells]], 1).ravel()
        times = np.stack([self.start[cells], self.end[cells]], 1).ravel()
        # Between a cell and the one right after it, memory falls for no time: such a dip is left out.
        stays = np.ones(times.size, bool)
        stays[:-1] = (np.diff(times) > 0) | (np.diff(held) < 0)
        return Curve(times[stays], held[stays])

    @cached_property
    def held(self) -> Floats:
        """[cells] The highest memory while the cell runs, and before it; JOINs of works free some before it."""
        if self.works is not None:
            return self.inside
        before = np.concatenate([[0.0], self.after[:-1]])[: len(self)]
        before[self.rank_start[:-1][np.diff(self.rank_start) > 0]] = 0.0
        return np.asarray(np.maximum(before, self.inside))

    def phase_runs(self, rank: int) -> list[tuple[int, float, float]]:
        """(number in `phase_names`, begin, end) of each run of a rank's cells in one phase, in time units."""
        cells = self.of_rank(rank)
        phase = self.phase[cells]
        if phase.size == 0:
            return []
        first = np.flatnonzero(np.diff(phase, prepend=-1))
        last = np.append(first[1:], phase.size) - 1
        starts, ends = self.start[cells][first], self.end[cells][last]
        return [(int(p), float(a), float(b)) for p, a, b in zip(phase[first], starts, ends, strict=True)]

    @cached_property
    def phase_names(self) -> list[str]:
        """The names of the phases without repetition: a source may write one phase in several parts."""
        return list(dict.fromkeys(self.schedule.phases))

    @cached_property
    def phase(self) -> Int64:
        """[cells] Number in `phase_names` of each cell's phase."""
        number = {name: i for i, name in enumerate(self.phase_names)}
        return np.array([number[name] for name in self.schedule.phases])[self.schedule.phase[self.first]]


def cells_of(
    schedule: Schedule,
    timeline: Timeline,
    memory: Memory,
    works: WorkRuns | None = None,
    copies: CopyRuns | None = None,
) -> CellColumns:
    """[cells] The cells of a schedule with their times, and with the memory while they run and after them."""
    dependencies = timeline.dependencies
    first, second, start, end = dependencies.first, dependencies.second, timeline.start, timeline.end
    placement = schedule.placement
    chunk = placement.chunk_of[placement.pipe_of_microbatch(schedule.microbatch), schedule.stage]
    share = _forward_share(schedule, first, second, end - start)
    after = memory.memory if works is None else works.held_between(memory.memory)
    return CellColumns(
        schedule, dependencies.rank_start, first, second,
        start, start + share * (end - start), end, chunk, memory.memory_inside, after, timeline.makespan, works,
        copies,
    )  # fmt: skip


def _forward_share(schedule: Schedule, first: Int32, second: Int32, duration: Floats) -> Floats:
    """[cells] Part of a cell's width that shows its forward; 1 for single ops.

    A pair has one time. Its halves are in proportion to the times of both ops alone: on the same stage if ops run alone
    there, else on any stage. Where no such op runs alone, F and I have 1 and B has 2.
    duration: [cells] time units.
    """
    alone = np.flatnonzero(second < 0)
    key = schedule.kind[first[alone]].astype(np.int64) * schedule.stages + schedule.stage[first[alone]]
    shape = (len(OpKind), schedule.stages)
    total = bincount(key, duration[alone], len(OpKind) * schedule.stages).reshape(shape)
    count = bincount(key, minlength=len(OpKind) * schedule.stages).reshape(shape)
    usual = np.where(count.sum(1) > 0, total.sum(1) / np.maximum(count.sum(1), 1), _USUAL)
    cost = np.where(count > 0, total / np.maximum(count, 1), usual[:, None])
    forward = cost[schedule.kind[first], schedule.stage[first]]
    backward = cost[schedule.kind[second], schedule.stage[second]]
    both = forward + backward
    share = np.divide(forward, both, out=np.full(len(first), 0.5), where=both > 0)
    return np.where(second < 0, 1.0, share)
