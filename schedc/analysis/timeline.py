"""When every cell runs under given costs: in-order ranks, each cell as soon as what it waits for is there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from schedc.analysis.dependencies import Dependencies, reduce_by_rank
from schedc.cost.costs import Costs, StageCosts
from schedc.diagnostics import CompilerBug
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Int64, Schedule

Floats = npt.NDArray[np.float64]

_AT_ONCE = 1 << 22
"""Cells times cost vectors that one pass over the levels holds in memory."""


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
    span_bubble: [P] span - busy, and span_bubble_ratio = (cost - work) / cost, where cost is the largest span and
        work what the rank with that span computes: the rate of the zero-bubble paper (arXiv 2401.10241, 5.3),
        whose M(F + I + W) is the work of any rank when each has one stage and all stages cost the same.
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
        return _idle(np.asarray(self.makespan), self.busy)

    @property
    def span_bubble(self) -> Floats:
        return _idle(self.span, self.busy)

    @property
    def bubble_ratio(self) -> float:
        return float(_ratios(self.makespan, self.busy.mean()))

    @property
    def span_bubble_ratio(self) -> float:
        return float(_span_ratios(self.span[:, None], self.busy[:, None])[0])


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What K cost vectors make of one schedule: `Timeline`'s figures without its columns.

    makespan, bubble_ratio, span_bubble_ratio: [K]; busy, bubble, span_bubble: [P, K].
    """

    makespan: Floats
    busy: Floats
    bubble: Floats
    span_bubble: Floats
    bubble_ratio: Floats
    span_bubble_ratio: Floats


def simulate(schedule: Schedule, costs: Costs | None = None, dependencies: Dependencies | None = None) -> Timeline:
    """The timeline of a schedule without deadlock (`schedc.analysis.legality.check_schedule` finds those).

    Raises `DiagnosticError` (S404) for costs of another number of stages.
    """
    known = dependencies or Dependencies.of(schedule)
    stage_costs = (costs or Costs()).resolved(schedule.stages)
    duration = durations(known, stage_costs)
    latency = np.array([stage_costs.p2p])
    end = _ends(known, duration[:, None], latency)
    waits = _arrivals(known, end, latency)[:, :, 0]
    start = waits.max(axis=0)
    candidates = np.stack([known.previous, *known.producers])
    return Timeline(
        dependencies=known,
        start=start,
        end=end[:, 0],
        bound_by=candidates[waits.argmax(axis=0), np.arange(len(known))],
        busy=reduce_by_rank(np.add, duration, known.rank_start),
        span=_spans(known, start, end[:, 0]),
        makespan=float(end.max(initial=0.0)),
    )


def simulate_batch(dependencies: Dependencies, costs: list[Costs]) -> Outcomes:
    """The figures of `simulate` for each of many costs; exact where the costs are integers.

    The levels are walked once for all of them, or for as many at a time as fit in bounded memory.
    """
    stages = dependencies.schedule.stages
    step = max(1, _AT_ONCE // max(1, len(dependencies)))
    parts = [
        _batch(dependencies, [c.resolved(stages) for c in costs[at : at + step]]) for at in range(0, len(costs), step)
    ]
    busy, span, makespan = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    return Outcomes(
        makespan,
        busy,
        _idle(makespan, busy),
        _idle(span, busy),
        _ratios(makespan, busy.mean(axis=0)),
        _span_ratios(span, busy),
    )


def durations(dependencies: Dependencies, costs: StageCosts) -> Floats:
    """[cells] the time of every cell."""
    schedule = dependencies.schedule
    by_kind = np.stack([getattr(costs, kind.name) for kind in OpKind])
    first, second = dependencies.first, dependencies.second
    result = np.asarray(by_kind[schedule.kind[first], schedule.stage[first]])
    pairs = np.flatnonzero(dependencies.pairs)
    backward = second[pairs]
    full = schedule.kind[backward] == OpKind.B
    result[pairs] = costs.pair(schedule.stage[first[pairs]], schedule.stage[backward], full)
    return result


def _batch(dependencies: Dependencies, costs: list[StageCosts]) -> tuple[Floats, Floats, Floats]:
    """busy [P, K], span [P, K] and makespan [K] of K costs."""
    duration = np.stack([durations(dependencies, c) for c in costs], axis=1)
    end = _ends(dependencies, duration, np.array([c.p2p for c in costs]))
    busy = reduce_by_rank(np.add, duration, dependencies.rank_start)
    return busy, _spans(dependencies, end - duration, end), end.max(axis=0, initial=0.0)


def _ends(dependencies: Dependencies, duration: Floats, latency: Floats) -> Floats:
    """[cells, K] end of every cell; duration: [cells, K], latency: [K]. Level by level, in level order."""
    levels = dependencies.levels
    order, cells = levels.order, len(dependencies)
    if levels.stuck.size:
        raise CompilerBug("timeline", f"a schedule with a deadlock, at cells {levels.stuck[:4]}")
    position = np.empty(cells + 1, np.int64)
    position[order] = np.arange(cells)
    position[-1] = cells  # where "nothing to wait for" is: it ended at 0
    waits = position[np.stack([dependencies.previous, *dependencies.producers])[:, order]]
    delay = dependencies.remote[:, order, None] * latency if latency.any() else None
    spent = duration[order]
    end = np.zeros((cells + 1, latency.size))
    bounds = levels.start.tolist()
    for low, high in pairwise(bounds):
        arrival = end.take(waits[:, low:high], axis=0)
        if delay is not None:
            arrival[1:] += delay[:, low:high]
        np.add(np.maximum.reduce(arrival, axis=0), spent[low:high], out=end[low:high])
    return end[position[:-1]]


def _arrivals(dependencies: Dependencies, end: Floats, latency: Floats) -> Floats:
    """[3, cells, K] when the rank is free and when each of the two producers' outputs is there; 0 where none."""
    waits = np.stack([dependencies.previous, *dependencies.producers])
    arrival = np.where(waits[:, :, None] >= 0, end[waits] if end.size else 0.0, 0.0)
    arrival[1:] += dependencies.remote[:, :, None] * latency
    return arrival


def _spans(dependencies: Dependencies, start: Floats, end: Floats) -> Floats:
    """[P, ...] from the start of each rank's first cell to the end of its last."""
    first = reduce_by_rank(np.minimum, start, dependencies.rank_start)
    return np.asarray(reduce_by_rank(np.maximum, end, dependencies.rank_start) - first)


def _idle(whole: Floats, busy: Floats) -> Floats:
    """whole - busy, with what only rounding left over as 0: sums of many times differ in their last digits."""
    idle = whole - busy
    return np.asarray(np.where(np.abs(idle) <= 1e-12 * whole, 0.0, idle))


def _span_ratios(span: Floats, busy: Floats) -> Floats:
    """[K] idle share of the rank with the largest span; of several, of the one that is idle most."""
    tied = span >= span.max(axis=0) * (1 - 1e-12)
    least = np.where(tied, busy, np.inf).min(axis=0)
    return _ratios(span.max(axis=0), least)


def _ratios(whole: npt.ArrayLike, part: npt.ArrayLike) -> Floats:
    """1 - part / whole; 0 where there is nothing to do."""
    whole = np.asarray(whole, np.float64)
    safe = np.where(whole > 0, whole, 1.0)
    return np.asarray(np.where(whole > 0, (whole - part) / safe, 0.0))
