"""Lowers STARTs and JOINs of works to instructions, in the gaps between the cells of an order.

A START is the latest of the rank's clock and its lane, plus the time of the work: its value is when the work ends. A
JOIN is the latest of the clock and that end: it is the rank's clock from then on.
"""

from __future__ import annotations

import numpy as np

from schedc.ir.arrays import Floats, Int32, bincount
from schedc.ir.works import WorkLane
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks, WorkPlace


class Gaps:
    """The STARTs and JOINs of an order, [events] in the order of `PlacedWorks.events`.

    rank: [events]. cell: [events] the cell behind the gap, or the next rank's first. closing: [events] whether the gap
    lies behind the last cell of its rank. start, join: [works] the events of each work. counts: [cells] events in front
    of each. waits: [works] the work before each on its lane, -1: none.
    """

    def __init__(self, dependencies: Dependencies, placed: PlacedWorks) -> None:
        self.dependencies, self.events, self.queue = dependencies, placed.events, placed.works.queue
        self.rank = placed.rank_of(self.events.gap, dependencies)
        self.cell = self.events.gap - self.rank
        self.closing = self.cell == dependencies.rank_start[self.rank + 1]
        self.counts = bincount(self.cell[~self.closing], minlength=len(dependencies))
        self.start, self.join = np.zeros((2, len(placed)), np.int64)
        for events, joins in ((self.start, False), (self.join, True)):
            own = np.flatnonzero(self.events.joins == joins)
            events[self.events.work[own]] = own
        lane = self.rank[self.start] * (len(WorkLane) + 1) + self.queue
        order = np.lexsort((self.start, lane))
        self.waits = np.full(len(placed), -1)
        again = lane[order[1:]] == lane[order[:-1]]
        self.waits[order[1:][again]] = order[:-1][again]

    def lower(self, base: Int32, end: Int32, total: int) -> None:
        """Numbers the instructions; -1: time 0. base, end: [cells] the first of each cell, and that of its end.

        total: instructions in front of those behind the last cells. Gives number, clock, behind: [events] the
        instruction of each, and those of the rank's clock in front of it and behind it.
        """
        events, turn = self.events, np.arange(self.cell.size)
        first = np.searchsorted(events.gap, events.gap)
        inside = np.append(base, 0)[np.where(self.closing, len(base), self.cell)] + turn - first
        self.number = np.where(self.closing, total + np.cumsum(self.closing) - 1, inside).astype(np.int32)
        before = np.where(self.cell > self.dependencies.rank_start[self.rank], np.append(end, 0)[self.cell - 1], -1)
        joined = np.maximum.accumulate(np.where(events.joins, turn, -1))
        last = np.append(-1, joined)[:-1]
        self.clock = np.where(last >= first, self.number[last], before).astype(np.int32)
        self.behind = np.where(joined >= first, self.number[joined], before).astype(np.int32)

    def move_clocks(self, reached: Int32, closed: Int32) -> None:
        """Puts the clocks behind the events in place of those of ranks without works; see `schedc.step.lowering`."""
        reached[self.cell[~self.closing]] = self.behind[~self.closing]  # the last of a gap stays
        closed[self.rank[self.closing]] = self.behind[self.closing]

    @property
    def lanes(self) -> Int32:
        """[works] the instruction of the end of the work before each on its lane."""
        return np.where(self.waits >= 0, self.number[self.start[self.waits]], np.int32(-1))

    def busy(self, lane: int) -> Int32:
        """[cells] the instruction of the last START of a lane in front of each cell; -1: none."""
        rank, start = self.dependencies.rank, np.sort(self.start[self.queue == lane])
        if not start.size:
            return np.full(rank.size, -1, np.int32)
        gaps = np.arange(rank.size) + rank
        last = start[np.searchsorted(self.events.gap[start], gaps, side="right") - 1]
        there = (self.events.gap[last] <= gaps) & (self.rank[last] == rank)
        return np.where(there, self.number[last], np.int32(-1))

    def times(self, values: Floats, messages: Floats | None = None) -> tuple[Floats, Floats, Floats]:
        """[works, ...] when each begins and ends on its lane, and how long its rank stands at its JOIN.

        values: [n + 1, ...] of the walk, and 0. messages: [cells, ...] arrival of the messages of each cell, if late
        JOINs stand behind them. By default ranks wait for messages behind all JOINs.
        """
        begin = np.maximum(values[self.clock[self.start]], values[self.lanes])
        clock, finish = values[self.clock[self.join]], values[self.number[self.start]]
        if messages is not None:
            late = (self.events.place[self.join] >= WorkPlace.CAME) & ~self.closing[self.join]
            clock[late] = np.maximum(clock[late], messages[self.cell[self.join[late]]])
        return begin, finish, np.maximum(finish - clock, 0.0)
