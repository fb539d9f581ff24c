"""Walks the STARTs and JOINs of works beside cells that are simulated level by level, on one rank or on all of a group.

`schedc.step.placed_works.run_with_works` does the same for cells that send at their ends, and wait at their
starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Floats, Int32, Int64
from schedc.ir.works import WorkLane
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks


@dataclass(frozen=True, eq=False)
class TimedWorks:
    """Works with their places and the times of their lanes. time: [works] on the lane, in the unit of the cells."""

    placed: PlacedWorks
    time: Floats


class LaneWalk:
    """The lanes of every rank while a simulation goes through the cells, level by level.

    members: ranks of a group that go through the cells in step.

    begin, finish: [works, members] when each work runs on its lane. exposed: [works, members] time that the rank stood
    at the JOIN.
    """

    def __init__(self, dependencies: Dependencies, works: TimedWorks, members: int = 1) -> None:
        cells, ranks = len(dependencies), dependencies.rank_start.size - 1
        self._rank, self._rank_start = dependencies.rank, dependencies.rank_start
        self._events, self._time, self._lane = works.placed.events, works.time, works.placed.works.lane
        self._first = np.searchsorted(self._events.gap, np.arange(cells + ranks + 1))
        self._free = np.zeros((ranks, len(WorkLane), members))
        self.begin, self.finish, self.exposed = np.zeros((3, len(works.placed), members))

    def reach(self, cells: Int32 | Int64, ready: Floats) -> Floats:
        """[cells, members] when each rank reaches its cell: behind the STARTs and JOINs of the gap in front of it.

        cells: on different ranks; `reach` must have had the earlier cells of these ranks.
        ready: [cells, members] when the rank is free. Waits for messages are not counted.
        """
        rank = self._rank[cells].astype(np.int64)
        return self._through(cells + rank, rank, ready)

    def close(self, end: Floats) -> Floats:
        """[P, members] when each rank has joined what stands behind its last cell; end: [cells, members]."""
        full = np.flatnonzero(np.diff(self._rank_start) > 0)
        closed = np.zeros((self._rank_start.size - 1, end.shape[1]))
        closed[full] = end[self._rank_start[full + 1] - 1]
        ranks = np.arange(len(closed))
        return self._through(self._rank_start[1:] + ranks, ranks, closed)

    def _through(self, gap: Int64, rank: Int64, ready: Floats) -> Floats:
        first = self._first[gap]
        count = self._first[gap + 1] - first
        if not count.any():
            return ready
        now = ready.copy()
        for turn in range(int(count.max())):
            row = np.flatnonzero(count > turn)
            event = first[row] + turn
            work, joins = self._events.work[event], self._events.joins[event]
            self._start(work[~joins], rank[row[~joins]], now[row[~joins]])
            joined, here = work[joins], row[joins]
            self.exposed[joined] = np.maximum(self.finish[joined] - now[here], 0.0)
            now[here] = np.maximum(now[here], self.finish[joined])
        return now

    def _start(self, work: Int64, rank: Int64, now: Floats) -> None:
        lane = self._lane[work]
        self.begin[work] = np.maximum(now, self._free[rank, lane])
        self.finish[work] = self.begin[work] + self._time[work][:, None]
        self._free[rank, lane] = self.finish[work]


def walk_of(works: TimedWorks | None, dependencies: Dependencies, members: int = 1) -> LaneWalk | None:
    """The lanes for a simulation that begins; None without works."""
    return None if works is None else LaneWalk(dependencies, works, members)
