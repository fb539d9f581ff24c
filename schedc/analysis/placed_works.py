"""Works with their places between the cells of a schedule: what they keep off the device, and when their lanes run.

A gap is the place in front of a cell, or behind the last cell of a rank; rank r with n cells has n + 1 of them. The gap
in front of a cell has the cell's number plus its rank. Inside a gap the order is: posts of messages, STARTs of what
leaves, JOINs of what leaves, STARTs of what comes, waits for messages, JOINs of what comes, the cell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.numba_kernels import kernels
from schedc.ir.arrays import Floats, Int8, Int32, Int64, bincount
from schedc.ir.works import DTYPES, FACTS, NO_WORKS, WorkKind, WorkLane, Works

_PYTHON_CELL = 4e-6
"""Seconds that the interpreted loop takes for a cell, roughly: what decides whether to load the compiled loop."""

_LANES = np.array([FACTS[kind].lane for kind in WorkKind])
_PLACES = 4
_UNDISTURBED: Floats = np.zeros(0)
"""Lanes that slow no compute down."""
_COMES = np.array([FACTS[kind].at_start > 0 for kind in WorkKind])


@dataclass(frozen=True, eq=False)
class PlacedWorks:
    """Works in the order of their STARTs, rank by rank. start, join: [works] the gaps of their STARTs and JOINs."""

    works: Works
    start: Int64
    join: Int64

    @classmethod
    def of(
        cls,
        kind: Int8,
        stage: Int32,
        microbatch: Int32,
        bytes: Floats,
        start: Int32 | Int64,
        join: Int32 | Int64,
    ) -> PlacedWorks:
        """The works in the order of their STARTs. Inside a gap what leaves comes first, in the order of the JOINs.

        All [works]; start, join: gaps; bytes: memory that moves.
        """
        order = np.lexsort((microbatch, stage, join, kind, start))
        columns: tuple[Any, ...] = (kind, _LANES[kind], stage, microbatch, bytes)
        typed = [column[order].astype(dtype) for column, dtype in zip(columns, DTYPES.values(), strict=True)]
        return cls(Works(*typed), start[order].astype(np.int64), join[order].astype(np.int64))

    @classmethod
    def none(cls) -> PlacedWorks:
        """No works."""
        return cls(NO_WORKS, np.zeros(0, np.int64), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.works)

    @property
    def comes(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[works] whether the work brings something to the device."""
        return np.asarray(_COMES[self.works.kind])

    def counted(self) -> PlacedWorks:
        """The same works, each of which moves 1."""
        return replace(self, works=replace(self.works, bytes=np.ones(len(self))))

    def rank_of(self, gaps: Int64, dependencies: Dependencies) -> Int64:
        """[gaps] the rank of each gap."""
        first = dependencies.rank_start[:-1] + np.arange(dependencies.rank_start.size - 1)
        return np.searchsorted(first, gaps, side="right") - 1

    def away(self, dependencies: Dependencies) -> Floats:
        """[cells] memory that is not on the device while each cell runs: what has left less what has come back.

        The unit is that of the works' bytes. It follows from the order alone. An activation counts as present until
        the JOIN of its offload, and from the START of its fetch on.
        """
        gap = np.where(self.comes, self.start, self.join)
        change = np.where(self.comes, -self.works.bytes, self.works.bytes)
        ranks = dependencies.rank_start.size - 1
        by_gap = bincount(gap, weights=change, minlength=len(dependencies) + ranks)
        total = np.cumsum(by_gap)
        before = np.concatenate([[0.0], total])[dependencies.rank_start[:-1] + np.arange(ranks)]
        cells = np.arange(len(dependencies)) + dependencies.rank
        return np.asarray(total[cells] - before[dependencies.rank])

    @cached_property
    def events(self) -> Events:
        """The STARTs and JOINs in the order in which each rank meets them."""
        works = np.arange(len(self))
        gap = np.concatenate([self.start, self.join])
        work = np.concatenate([works, works])
        join = np.arange(gap.size) >= len(self)
        comes = self.comes[work]
        place = np.where(comes, np.where(join, 3, 2), np.where(join, 1, 0))
        order = np.argsort(gap * _PLACES + place, kind="stable")
        return Events(gap[order], work[order], place[order].astype(np.int8))


@dataclass(frozen=True, eq=False)
class Events:
    """STARTs and JOINs in order. gap, work: [events].

    place: [events] the place inside the gap. 0: START of what leaves; 1: its JOIN; 2: START of what comes; 3: its JOIN,
    which is behind the waits for messages.
    """

    gap: Int64
    work: Int64
    place: Int8


@dataclass(frozen=True, eq=False)
class LaneTimes:
    """When cells and works run.

    start, end: [cells]; begin, finish: [works] on their lanes; exposed: [works] time that the rank stood at the JOIN.
    """

    start: Floats
    end: Floats
    begin: Floats
    finish: Floats
    exposed: Floats

    def per_rank(self, placed: PlacedWorks, dependencies: Dependencies, values: Floats) -> Floats:
        """[P, lanes] ``values`` [works] summed by rank and lane."""
        ranks = dependencies.rank_start.size - 1
        rank = placed.rank_of(placed.start, dependencies)
        sums = bincount(rank * len(WorkLane) + placed.works.lane, weights=values, minlength=ranks * len(WorkLane))
        return np.asarray(sums.reshape(ranks, len(WorkLane)))


def run_with_works(
    dependencies: Dependencies,
    duration: Floats,
    latency: float,
    placed: PlacedWorks,
    time: Floats,
    slowdown: Floats = _UNDISTURBED,
) -> LaneTimes:
    """When every cell and every work runs: each rank in order, each lane in the order of its STARTs.

    duration: [cells] time of each alone; latency: time of a message; time: [works] on the lane. slowdown: [lanes] by
    how much more a cell takes while a lane of its rank is busy; those of several lanes add up. Works take their time
    whatever runs beside them.
    """
    cells, ranks = len(dependencies), dependencies.rank_start.size - 1
    events = placed.events
    first = np.searchsorted(events.gap, np.arange(cells + ranks + 1))
    start, end = np.zeros(cells), np.zeros(cells)
    begin, finish, exposed = np.zeros((3, len(placed)))
    disturbing = np.asarray(slowdown if np.any(slowdown > 0) else _UNDISTURBED, np.float64)
    loop = kernels(cells * _PYTHON_CELL)
    (loop.jit(_run) if loop else _run)(
        dependencies.levels.order, dependencies.rank, dependencies.previous, dependencies.producers,
        dependencies.remote, duration, latency, first, events.work, events.place, placed.works.lane, time, disturbing,
        np.zeros((ranks, len(WorkLane))), start, end, begin, finish, exposed,
    )  # fmt: skip
    return LaneTimes(start, end, begin, finish, exposed)


def _run(
    order: Any, rank: Any, previous: Any, producers: Any, remote: Any, duration: Any, latency: float, first: Any,
    event_work: Any, event_place: Any, lane: Any, time: Any, slowdown: Any, free: Any, start: Any, end: Any,
    begin: Any, finish: Any, exposed: Any,
) -> None:  # fmt: skip
    """Fills ``start`` to ``exposed``. free: [P, lanes] when each lane is free. first: [gaps + 1] first event of each.

    Works in the last gap of a rank are joined behind its cells and hold up nobody. All works beside a cell have started
    before it. So a lane is busy from the cell's start until it is free, without a gap, and a round below ends a lane.
    """
    for step in range(order.size):
        cell = order[step]
        own = rank[cell]
        now = end[previous[cell]] if previous[cell] >= 0 else 0.0
        event = first[cell + own]
        last = first[cell + own + 1]
        while event < last and event_place[event] < 3:
            work = event_work[event]
            if event_place[event] == 1:
                exposed[work] = max(0.0, finish[work] - now)
                now = max(now, finish[work])
            else:
                begin[work] = max(now, free[own, lane[work]])
                finish[work] = begin[work] + time[work]
                free[own, lane[work]] = finish[work]
            event += 1
        for row in range(2):
            producer = producers[row, cell]
            if producer >= 0:
                now = max(now, end[producer] + (latency if remote[row, cell] else 0.0))
        while event < last:
            work = event_work[event]
            exposed[work] = max(0.0, finish[work] - now)
            now = max(now, finish[work])
            event += 1
        start[cell] = now
        left = duration[cell]
        while True:
            pace, until = 1.0, np.inf
            for at in range(slowdown.size):
                if slowdown[at] > 0 and free[own, at] > now:
                    pace += slowdown[at]
                    until = min(until, free[own, at])
            if until - now >= left * pace:
                break
            left -= (until - now) / pace
            now = until
        end[cell] = now + left * pace
