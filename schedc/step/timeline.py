"""When every cell runs under given costs: in-order ranks, each cell as soon as what it waits for is there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.step.cell_durations import alike_durations
from schedc.step.costs.costs import Costs, StageCosts
from schedc.step.dependencies import Dependencies, reduce_by_rank
from schedc.step.lowering import closed_cells
from schedc.step.ratios import idle, ratios, span_ratios
from schedc.step.unequal import CellParts
from schedc.step.walk import Numbers, run


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step. Times are in the unit of the costs.

    dependencies: the cells that the columns speak of.
    start, end: [cells]
    bound_by: [cells] the cell that the start waited for: the one before it on its rank, or a producer; -1 where
        it starts at 0 and waited for nothing. Following it from a last cell gives the critical path.
    busy: [P] time that a rank computes; span: [P] from a rank's first start to its last end.
    makespan: the last end.
    bubble: [P] makespan - busy, and bubble_ratio = 1 - all work / (P * makespan): idle time in a step that all
        ranks begin together (DeepSeek, Megatron and Chimera count so).
    span_bubble: [P] span - busy, and span_bubble_ratio = 1 - all work / (P * longest span): bubble_ratio where no rank
        waits for another at the end of a step. With equal work on all ranks it is the bubble rate of the zero-bubble
        paper (arXiv 2401.10241, 5.3), which divides by the largest cost of a stage.
    """

    dependencies: Dependencies
    start: Floats
    end: Floats
    bound_by: Int64
    busy: Floats
    span: Floats
    makespan: float

    @property
    def bubble(self) -> Floats:
        return idle(np.asarray(self.makespan), self.busy)

    @property
    def span_bubble(self) -> Floats:
        return idle(self.span, self.busy)

    @property
    def recomputing(self) -> Floats:
        """[P] the part of ``busy`` that the Rs of the schedule take."""
        known = self.dependencies
        again = known.schedule.kind[known.first] == OpKind.R
        return reduce_by_rank(np.add, np.where(again, self.end - self.start, 0.0), known.rank_start)

    @property
    def bubble_ratio(self) -> float:
        return float(ratios(self.makespan, self.busy.mean()))

    @property
    def span_bubble_ratio(self) -> float:
        return float(span_ratios(self.span[:, None], self.busy[:, None])[0])


@dataclass(frozen=True, eq=False)
class CellTimes:
    """When the cells of a step run without works beside them, under costs.

    duration, start, end: [cells]; latency: time of a message; slowdown: [lanes of works] as in `StageCosts`.
    """

    dependencies: Dependencies
    duration: Floats
    start: Floats
    end: Floats
    latency: float
    slowdown: Floats

    @classmethod
    def of(cls, dependencies: Dependencies, costs: StageCosts) -> CellTimes:
        """The times under these costs. The schedule has no deadlock."""
        duration = durations(dependencies, costs)
        start, end = run_durations(dependencies, duration, costs.p2p)
        return cls(dependencies, duration, start, end, costs.p2p, costs.slowdown)

    @property
    def makespan(self) -> float:
        return float(self.end.max(initial=0.0))


def simulate(schedule: Schedule, costs: Costs | None = None, dependencies: Dependencies | None = None) -> Timeline:
    """The timeline of a schedule without deadlock (`schedc.step.legality.check_schedule` finds those).

    Raises `DiagnosticError` (S404) for costs of another number of stages.
    """
    known = dependencies or Dependencies.of(schedule)
    stage_costs = (costs or Costs()).resolved(schedule.stages)
    duration = durations(known, stage_costs)
    end = _ends(known, duration, stage_costs.p2p)
    return timeline_of(known, duration, end, arrivals(known, end, stage_costs.p2p))


def timeline_of(dependencies: Dependencies, duration: Floats, end: Floats, arrival: Floats) -> Timeline:
    """The timeline of cells whose ends are known.

    duration, end: [cells]; arrival: [3, cells] when the rank is free and each of the two producers' outputs is there,
    or how much of the cell must be left then.
    """
    start = np.maximum.reduce(arrival)
    candidates = np.stack([dependencies.previous, *dependencies.producers])
    return Timeline(
        dependencies=dependencies,
        start=start,
        end=end,
        bound_by=candidates[np.argmax(arrival, axis=0), np.arange(len(dependencies))].astype(np.int64),
        busy=reduce_by_rank(np.add, duration, dependencies.rank_start),
        span=_spans(dependencies, start, end),
        makespan=float(end.max(initial=0.0)),
    )


def observed(dependencies: Dependencies, start: Floats, end: Floats, latency: float = 0.0) -> Timeline:
    """The timeline of a run whose starts and ends, [cells], were measured; latency: time of a message.

    ``bound_by`` is what was there last of all that a cell needed: the cell before it on its rank, or a producer.
    """
    bound = timeline_of(dependencies, end - start, end, arrivals(dependencies, end, latency))
    return replace(bound, start=start, span=_spans(dependencies, start, end))


def run_times(dependencies: Dependencies, costs: Costs) -> tuple[Floats, Floats]:
    """[cells] start and end of every cell: of `simulate`, for those who ask for nothing else."""
    stage_costs = costs.resolved(dependencies.schedule.stages)
    return run_durations(dependencies, durations(dependencies, stage_costs), stage_costs.p2p)


def durations(dependencies: Dependencies, costs: StageCosts) -> Floats:
    """[cells] the time of every cell. A pair with a W takes as long as both ops: hidden time lies inside the cell.

    Raises `DiagnosticError` (S412) for factors of another number of microbatches.
    """
    if costs.microbatches is None:
        return alike_durations(dependencies, costs)
    return CellParts.of(dependencies, costs).times(costs.microbatches.of_schedule(dependencies.schedule))


def run_durations(dependencies: Dependencies, duration: Numbers, latency: float) -> tuple[Numbers, Numbers]:
    """[cells] start and end of every cell; duration: [cells], floats or Python's integers. latency: of a message."""
    end = _ends(dependencies, duration, latency)
    free = np.append(end, end.dtype.type(0))
    start: Numbers = free[dependencies.previous]
    for producer, remote in zip(dependencies.producers, dependencies.remote, strict=True):
        far = np.flatnonzero(remote)  # an output of the same rank is there before the rank is free
        start[far] = np.maximum(start[far], end[producer[far]] + latency)
    return start, end


def _ends(dependencies: Dependencies, duration: Numbers, latency: float) -> Numbers:
    walk, end = closed_cells(dependencies)
    times: Numbers = run(walk, np.array([[0], [latency]], duration.dtype), duration[:, None])[end, 0]
    return times


def arrivals(dependencies: Dependencies, there: Numbers, latency: float) -> Numbers:
    """[3, cells] when the rank is free, and when each of the two producers' outputs is there; 0 where none.

    there: [3, cells] the end of each cell, when its output leaves, and its gradient; [cells] where all leave at ends.
    latency: time of a message.
    """
    there = np.broadcast_to(there, (3, there.shape[-1]))
    waits = dependencies.previous, *dependencies.producers
    arrival = np.stack([np.append(of, of.dtype.type(0))[row] for of, row in zip(there, waits, strict=True)])
    if latency:
        arrival[1:] += dependencies.remote * np.array(latency, there.dtype)
    return arrival


def _spans(dependencies: Dependencies, start: Floats, end: Floats) -> Floats:
    """[P] from the start of each rank's first cell to the end of its last."""
    first = reduce_by_rank(np.minimum, start, dependencies.rank_start)
    return np.asarray(reduce_by_rank(np.maximum, end, dependencies.rank_start) - first)
