"""When the works of a step run on their lanes, and how long ranks stand at their JOINs: what drawings show of works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.ir.works import WorkLane, Works
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.kept import kept
from schedc.step.lowering import CLOSED, PACED, Lowered, lower
from schedc.step.placed_works import LaneTimes, PlacedWorks, TimedWorks
from schedc.step.timeline import CellTimes, Timeline, arrivals, observed
from schedc.step.walk import run
from schedc.step.work_lowering import Gaps


@dataclass(frozen=True, eq=False)
class WorkRuns:
    """The works of a step with their places and times, rank by rank in the order of their STARTs.

    time: [works] on the lane; times: when cells and works run; in time units. dependencies: those of the cells.
    in_bytes: whether the works' ``bytes`` are bytes, or in the unit of the plan's memory.
    """

    placed: PlacedWorks
    time: Floats
    times: LaneTimes
    dependencies: Dependencies
    in_bytes: bool

    def __len__(self) -> int:
        return len(self.placed)

    @property
    def works(self) -> Works:
        return self.placed.works

    @cached_property
    def rank(self) -> Int64:
        """[works] the rank of each."""
        return self.placed.rank_of(self.placed.start, self.dependencies)

    def lanes_of(self, rank: int) -> list[WorkLane]:
        """The lanes that the works of a rank use."""
        return [WorkLane(lane) for lane in np.unique(self.works.lane[self.rank == rank]).tolist()]

    def on(self, rank: int, lane: WorkLane) -> Int64:
        """[works of the lane] the rows of a lane of a rank, in order of time."""
        return np.flatnonzero((self.rank == rank) & (self.works.lane == lane))

    @property
    def waits(self) -> Iterator[tuple[int, float, float]]:
        """(work, begin, end) of each time that a rank stands at a JOIN, in time units; rank by rank."""
        exposed, finish = self.times.exposed, self.times.finish
        for row in np.flatnonzero(exposed > 0).tolist():
            yield row, float(finish[row] - exposed[row]), float(finish[row])

    def exposed_in(self, rank: Int64, start: Floats, end: Floats) -> Floats:
        """[intervals] how long ranks stand at JOINs inside intervals that are in order of rank and time; time units."""
        total = np.zeros(rank.size)
        for row, begin, finish in self.waits:
            low, high = np.searchsorted(rank, [self.rank[row], self.rank[row] + 1])
            place = low + int(np.searchsorted(start[low:high], (begin + finish) / 2, side="right")) - 1
            if low <= place < high and begin < end[place]:
                total[place] += finish - begin
        return np.minimum(total, end - start)

    def timeline(self, latency: float) -> Timeline:
        """The timeline of the cells, with the waits for works; latency: time of a message."""
        return observed(self.dependencies, self.times.start, self.times.end, latency)

    def held_between(self, after: Floats | Int64, counted: bool = False) -> Floats:
        """[cells] the most that a rank holds from the end of each cell to the start of the next.

        after: [cells] what is held behind each cell, as `Memory` has it. counted: in activations, not in memory.
        """
        placed = self.placed.of_activations.counted() if counted else self.placed
        return placed.most_between(self.dependencies, after + placed.away(self.dependencies))


def timeline_of(works: WorkRuns, costs: Costs) -> Timeline:
    """The timeline of a step with works. costs: those of the stages."""
    return works.timeline(float(costs.p2p))


def run_with_works(
    dependencies: Dependencies,
    duration: Floats,
    latency: float,
    placed: PlacedWorks,
    time: Floats,
    slowdown: Floats | None = None,
) -> LaneTimes:
    """When every cell and every work runs: each rank in order, each lane in the order of its STARTs.

    duration: [cells] time of each alone; latency: time of a message; time: [works] on the lane. slowdown: [lanes] by
    how much more a cell takes while a lane of its rank is busy; those of several lanes add up. Nothing slows works
    down.

    The members of a work among replicas are the same rank of equal programs with equal costs. Their clocks are equal,
    so all members start the work at the same time, and it takes its own time.
    """
    disturbing = () if slowdown is None else tuple(np.flatnonzero(slowdown > 0).tolist())
    lowered, gaps = _lowered(placed, dependencies, disturbing)
    lags = [0.0, latency, *(() if slowdown is None else slowdown[list(disturbing)])]
    values = run(lowered.walk, np.array(lags)[:, None], np.concatenate([duration, time])[:, None])
    end = values[lowered.end, 0]
    arrival = arrivals(dependencies, end, latency)
    messages = np.maximum(arrival[1], arrival[2])
    values = np.append(values[:, 0], 0.0)
    start = np.maximum(values[lowered.reached], messages)
    return LaneTimes(start, end, *(gaps.times(values, messages)), values[lowered.closed])


@kept
def _lowered(placed: PlacedWorks, dependencies: Dependencies, disturbing: tuple[int, ...]) -> tuple[Lowered, Gaps]:
    """The walk of an order beside works. Rows of adds: cells, then works. disturbing: lanes that slow cells down."""
    cells = np.arange(len(dependencies), dtype=np.int32)
    form, kinds = [PACED if disturbing else CLOSED], np.zeros(cells.size, np.int8)
    gaps = Gaps(dependencies, placed)
    return lower(dependencies, form, kinds, 0, cells, gaps, cells.size, disturbing), gaps


@dataclass(frozen=True, eq=False)
class StepWorks(TimedWorks):
    """The works of a step that is priced. cells: its cells without works. in_bytes: whether their bytes are bytes."""

    cells: CellTimes
    in_bytes: bool

    @cached_property
    def lanes(self) -> LaneTimes:
        """When cells and works run."""
        return self.beside(self.placed, self.time)

    def beside(self, placed: PlacedWorks, time: Floats) -> LaneTimes:
        """When the cells run beside other works than these. time: [works] on the lane."""
        cells = self.cells
        return run_with_works(cells.dependencies, cells.duration, cells.latency, placed, time, cells.slowdown)

    def runs(self, dependencies: Dependencies) -> WorkRuns:
        """The works at the times of their lanes."""
        return WorkRuns(self.placed, self.time, self.lanes, dependencies, self.in_bytes)
