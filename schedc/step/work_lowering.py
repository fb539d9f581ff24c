"""Lowers STARTs and JOINs of works to instructions, in the gaps between the cells of an order.

A START is the latest of the rank's clock and its lane, plus the time of the work: its value is when the work ends. A
JOIN is the latest of the clock and that end: it is the rank's clock from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int32, Int64, bincount
from schedc.ir.works import WorkLane
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import Events, PlacedWorks, WorkPlace


@dataclass(frozen=True, eq=False)
class Gaps:
    """The STARTs and JOINs of an order. All columns are [events], in the order in which ranks meet them."""

    dependencies: Dependencies
    placed: PlacedWorks

    @property
    def events(self) -> Events:
        return self.placed.events

    @cached_property
    def rank(self) -> Int64:
        return self.placed.rank_of(self.events.gap, self.dependencies)

    @cached_property
    def cell(self) -> Int64:
        """The cell behind the gap; behind the last cell of a rank the next rank's first one."""
        return np.asarray(self.events.gap - self.rank)

    @cached_property
    def closing(self) -> Bools:
        """Whether the gap lies behind the last cell of its rank."""
        return np.asarray(self.cell == self.dependencies.rank_start[self.rank + 1])

    @cached_property
    def counts(self) -> Int64:
        """[cells] events in the gap in front of each cell."""
        return bincount(self.cell[~self.closing], minlength=len(self.dependencies))

    def lowered(self, base: Int32, end: Int32, total: int) -> LoweredGaps:
        """The instructions of the events. base, end: [cells] the first instruction and the end of each cell.

        total: the number of instructions in front of those behind the last cells.
        """
        events, turn = self.events, np.arange(self.cell.size)
        first = np.searchsorted(events.gap, events.gap)
        inside = np.append(base, 0)[np.where(self.closing, len(base), self.cell)] + turn - first
        number = np.where(self.closing, total + np.cumsum(self.closing) - 1, inside).astype(np.int32)
        before = np.where(self.cell > self.dependencies.rank_start[self.rank], np.append(end, 0)[self.cell - 1], -1)
        joined = np.maximum.accumulate(np.where(events.joins, turn, -1))
        last = np.concatenate([[-1], joined[:-1]])[: turn.size]
        clock = np.where(last >= first, number[last], before).astype(np.int32)
        behind = np.where(joined >= first, number[joined], before).astype(np.int32)
        return LoweredGaps(self, number, clock, behind)


@dataclass(frozen=True, eq=False)
class LoweredGaps:
    """[events] the instruction of each, and those of the rank's clock in front of it and behind it; -1: time 0."""

    gaps: Gaps
    number: Int32
    clock: Int32
    behind: Int32

    def move_clocks(self, reached: Int32, closed: Int32) -> None:
        """Puts the clocks behind the events in place of those of ranks without works; see `Lowered`."""
        gaps, closing = self.gaps, self.gaps.closing
        reached[gaps.cell[~closing]] = self.behind[~closing]  # the last of a gap stays
        closed[gaps.rank[closing]] = self.behind[closing]

    @cached_property
    def _starts(self) -> tuple[Int64, Int64, Int32]:
        """Of each START, [works] by work: its event, the number of its lane among those of all ranks, and `waits`."""
        events, placed = self.gaps.events, self.gaps.placed
        start = np.flatnonzero(~events.joins)
        lane = self.gaps.rank[start] * (len(WorkLane) + 1) + placed.queue[events.work[start]]
        order = np.argsort(lane, kind="stable")
        waits = np.full(start.size, -1, np.int32)
        again = lane[order[1:]] == lane[order[:-1]]
        waits[order[1:][again]] = self.number[start[order[:-1][again]]]
        by_work = np.argsort(events.work[start])
        return start[by_work], lane[by_work], waits[by_work]

    @property
    def ends(self) -> Int32:
        """[works] the instruction of the end of each work."""
        return self.number[self._starts[0]]

    @property
    def waits(self) -> Int32:
        """[works] the instruction of the end of the work before it on its lane."""
        return self._starts[2]

    def instructions(self) -> tuple[tuple[Int32, Int32, Int32], tuple[Int32, Int32, Int32]]:
        """(instruction, first input, second input) of all STARTs, [works] by work, and of all JOINs."""
        events, (start, _, waits) = self.gaps.events, self._starts
        join = np.flatnonzero(events.joins)
        return (
            (self.number[start], self.clock[start], waits),
            (self.number[join], self.clock[join], self.ends[events.work[join]]),
        )

    def busy(self, lane: int) -> Int32:
        """[cells] the instruction of the last START of a lane in front of each cell; -1: none."""
        events, cells = self.gaps.events, np.arange(len(self.gaps.dependencies))
        rank = self.gaps.dependencies.rank
        start = np.flatnonzero(~events.joins)
        start = start[self.gaps.placed.queue[events.work[start]] == lane]
        if not start.size:
            return np.full(cells.size, -1, np.int32)
        last = np.searchsorted(events.gap[start], cells + rank, side="right") - 1
        there = (last >= 0) & (self.gaps.rank[start[last]] == rank)
        return np.where(there, self.number[start[last]], np.int32(-1))

    def times(self, values: Floats, messages: Floats | None = None) -> tuple[Floats, Floats, Floats]:
        """[works, ...] when each begins and ends on its lane, and how long its rank stands at its JOIN.

        values: [n + 1, ...] of the walk, and 0. messages: [cells, ...] arrival of the messages of each cell, if late
        JOINs stand behind them. By default ranks wait for messages behind all JOINs.
        """
        events, (start, _, waits) = self.gaps.events, self._starts
        begin = np.maximum(values[self.clock[start]], values[waits])
        join = np.flatnonzero(events.joins)
        join = join[np.argsort(events.work[join])]
        clock, finish = values[self.clock[join]], values[self.ends]
        if messages is not None:
            late = (events.place[join] >= WorkPlace.CAME) & ~self.gaps.closing[join]
            clock[late] = np.maximum(clock[late], messages[self.gaps.cell[join[late]]])
        return begin, finish, np.maximum(finish - clock, 0.0)
