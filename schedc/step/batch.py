"""One schedule under many cost vectors at once: the order of its cells is found once, the costs run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Bools, Floats, Int32, Int64, bincount, reduceat
from schedc.step.cell_durations import cell_classes, durations_of
from schedc.step.costs.batch import CostBatch
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.kept import kept
from schedc.step.numba_kernels import COST, FRESH, RANK, kernels
from schedc.step.ratios import idle, ratios, span_ratios

_WIDTH = 256
"""Cost vectors that the compiled loop runs at a time: the rows that it reads and writes then stay in the caches."""

_IN_CACHE, _IN_MEMORY = 1 << 20, 1 << 25
"""Cells times cost vectors that numpy's way holds at a time: so many that levels are wide, and at most."""

_LEAST_WIDTH = 32

_NUMPY_OPS = 2e8
_NUMPY_LEVEL = 2e-5
"""Cells per second and seconds per level of numpy's way, roughly: what decides whether to load the compiled loop."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What K cost vectors make of one schedule: `Timeline`'s figures without its columns.

    makespan, bubble_ratio, span_bubble_ratio: [K]; busy, span, bubble, span_bubble: [P, K].
    """

    makespan: Floats
    busy: Floats
    span: Floats

    @property
    def bubble(self) -> Floats:
        return idle(self.makespan, self.busy)

    @property
    def span_bubble(self) -> Floats:
        return idle(self.span, self.busy)

    @property
    def bubble_ratio(self) -> Floats:
        return ratios(self.makespan, self.busy.mean(axis=0))

    @property
    def span_bubble_ratio(self) -> Floats:
        return span_ratios(self.span, self.busy)


def simulate_batch(dependencies: Dependencies, costs: CostBatch | Sequence[Costs]) -> Outcomes:
    """The figures of `schedc.step.timeline.simulate` for each of many cost vectors; the same to the last digit.

    busy alone is summed in another order (how often each duration occurs, times it), so that where costs are not
    integers its last digits may differ. Raises `DiagnosticError` (S404) for costs of another number of stages.
    """
    stages = dependencies.schedule.stages
    batch = costs if isinstance(costs, CostBatch) else CostBatch.of(costs, stages)
    rows = batch.rows(stages)
    groups, classes = cell_classes(dependencies, len(rows.F))
    duration = durations_of(groups, rows)
    begin, end = edges(dependencies, classes, duration, rows.p2p)
    return Outcomes(end.max(axis=0, initial=0.0), _busy(dependencies, classes, duration), end - begin)


def _busy(dependencies: Dependencies, classes: Int64, duration: Floats) -> Floats:
    """[P, K] how long each rank computes."""
    ranks, kinds = dependencies.rank_start.size - 1, duration.shape[0]
    counts = bincount(dependencies.rank * np.int64(kinds) + classes, minlength=ranks * kinds).reshape(ranks, kinds)
    busy = np.zeros((ranks, duration.shape[1]))
    for rank, kind in np.argwhere(counts):
        busy[rank] += counts[rank, kind] * duration[kind]
    return busy


# The walk over the cells.


@dataclass(frozen=True, eq=False)
class _Steps:
    """The cells in order of level, which is order: [n].

    waits: [n, 2] steps of other ranks whose output one waits for, -1 where none; the only one is the first of the two.
    An output of the same rank is never later than that rank is free.
    rank: [n] of each step; fresh: [n] whether it is the first of its rank. start: [levels + 1] of each level.
    """

    order: Int32
    waits: Int64
    rank: Int32
    fresh: Bools
    start: Int64


@kept
def _steps(dependencies: Dependencies) -> _Steps:
    levels, cells = dependencies.levels, len(dependencies)
    if levels.stuck.size:
        raise CompilerBug("timeline", f"a schedule with a deadlock, at cells {levels.stuck[:4]}")
    order = levels.order
    position = np.full(cells + 1, -1)
    position[order] = np.arange(cells)
    waits = position[np.where(dependencies.remote, dependencies.producers, -1)[:, order]]
    waits = np.where(waits[0] < 0, waits[::-1], waits)
    fresh = dependencies.previous[order] < 0
    return _Steps(order, np.ascontiguousarray(waits.T), dependencies.rank[order], fresh, levels.start)


@kept
def _table(dependencies: Dependencies) -> tuple[Int32, int]:
    """[n, 6] the steps for the compiled loop, without their costs, and the number of rows that it needs."""
    steps, loops = _steps(dependencies), kernels(np.inf)
    if loops is None:
        raise CompilerBug("timeline", "rows of the compiled loop without one")
    last_use = np.full(len(steps.waits), -1)
    for column in steps.waits.T:
        waiting = np.flatnonzero(column >= 0)
        np.maximum.at(last_use, column[waiting], waiting)
    table = np.zeros((len(steps.waits), 6), np.int32)
    table[:, RANK], table[:, FRESH] = steps.rank, steps.fresh
    return table, int(loops.assign_rows(steps.waits, last_use, table, dependencies.rank_start.size - 1))


def edges(dependencies: Dependencies, classes: Int64, duration: Floats, latency: Floats) -> tuple[Floats, Floats]:
    """[P, K] when each rank's first cell starts, and when its last ends.

    classes: [cells] class of every cell; duration: [classes, K] the time of a cell by its class; latency: [K].
    """
    steps = _steps(dependencies)
    ranks, total = dependencies.rank_start.size - 1, latency.size
    begin, end = np.zeros((ranks, total)), np.zeros((ranks, total))
    cells = max(1, len(dependencies))
    width = max(1, min(max(_LEAST_WIDTH, _IN_CACHE // cells), _IN_MEMORY // cells))
    turns = -(-total // width)
    loops = kernels(cells * total / _NUMPY_OPS + steps.start.size * turns * _NUMPY_LEVEL)
    if loops:
        table, rows = _table(dependencies)
        table = table.copy()
        table[:, COST] = classes[steps.order]
        value = np.zeros((rows, min(_WIDTH, latency.size)))
        loops.advance(table, np.ascontiguousarray(duration), latency, value, begin, end)
        return begin, end
    cost = classes[steps.order]
    for low in range(0, total, width):
        part = slice(low, low + width)
        _run_levels(steps, cost, duration[:, part], latency[part], begin[:, part], end[:, part])
    return begin, end


def _run_levels(steps: _Steps, cost: Int64, duration: Floats, latency: Floats, begin: Floats, end: Floats) -> None:
    """What `schedc.step.numba_kernels.advance` does, level by level: no two steps of a level are of one rank."""
    ranks, count = begin.shape[0], len(steps.waits)
    nothing = ranks + count  # the row of what nobody waits for
    value = np.zeros((nothing + 1, latency.size))
    value[nothing] = -np.inf
    rows = np.where(steps.waits >= 0, ranks + steps.waits, nothing)
    rank, fresh = steps.rank, steps.fresh
    late = bool(latency.any())
    levels = pairwise(steps.start.tolist())
    marks = np.stack([rows[:, 1] < nothing, fresh])
    some = reduceat(np.logical_or, marks, steps.start[:-1], axis=1).T.tolist() if count else []
    for (low, high), (two, begins) in zip(levels, some, strict=True):
        who = rank[low:high]
        time = value.take(rows[low:high, 0], axis=0)
        if two:
            np.maximum(time, value.take(rows[low:high, 1], axis=0), out=time)
        if late:
            time += latency
        np.maximum(time, value.take(who, axis=0), out=time)
        if begins:
            first = np.flatnonzero(fresh[low:high])
            begin[who[first]] = time[first]
        time += duration.take(cost[low:high], axis=0)
        value[who] = time
        value[ranks + low : ranks + high] = time
    end[:] = value[:ranks]
