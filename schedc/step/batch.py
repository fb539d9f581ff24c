"""One schedule under many cost vectors at once: the order of its cells is found once, the costs run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats, Int64, bincount
from schedc.step.cell_durations import cell_classes, durations_of
from schedc.step.costs.batch import CostBatch
from schedc.step.costs.costs import Costs, StageCosts
from schedc.step.dependencies import Dependencies, reduce_by_rank
from schedc.step.kept import kept
from schedc.step.lowering import closed_cells
from schedc.step.ratios import idle, ratios, span_ratios
from schedc.step.timeline import durations
from schedc.step.walk import run


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

    ``busy`` alone is summed in another order: each duration times its count. Unless costs are integers, its last digits
    may differ. Raises `DiagnosticError` (S404) for costs of another number of stages, and S412 for factors of another
    number of microbatches.
    """
    stages = dependencies.schedule.stages
    if not isinstance(costs, CostBatch) and any(c.microbatches for c in costs):
        return _unequal(dependencies, [c.resolved(stages) for c in costs])
    batch = costs if isinstance(costs, CostBatch) else CostBatch.of(costs, stages)
    rows = batch.rows(stages)
    groups, classes = cell_classes(dependencies, len(rows.F))
    duration = durations_of(groups, rows)
    begin, end = edges(dependencies, classes, duration, rows.p2p)
    return Outcomes(end.max(axis=0, initial=0.0), _busy(dependencies, classes, duration), end - begin)


def _unequal(dependencies: Dependencies, costs: Sequence[StageCosts]) -> Outcomes:
    """The figures of vectors of which some have factors of microbatches: every cell has a time of its own."""
    duration, every = np.stack([durations(dependencies, one) for one in costs], axis=1), np.arange(len(dependencies))
    begin, end = edges(dependencies, every, duration, np.array([one.p2p for one in costs], np.float64))
    busy = reduce_by_rank(np.add, duration, dependencies.rank_start)
    return Outcomes(end.max(axis=0, initial=0.0), busy, end - begin)


def _busy(dependencies: Dependencies, classes: Int64, duration: Floats) -> Floats:
    """[P, K] how long each rank computes."""
    ranks, kinds = dependencies.rank_start.size - 1, duration.shape[0]
    counts = bincount(dependencies.rank * np.int64(kinds) + classes, minlength=ranks * kinds).reshape(ranks, kinds)
    busy = np.zeros((ranks, duration.shape[1]))
    for rank, kind in np.argwhere(counts):
        busy[rank] += counts[rank, kind] * duration[kind]
    return busy


class _Watched(NamedTuple):
    """The cells whose ends give the edges of ranks.

    full: [n] ranks with cells. cells: [m] the last cells of these ranks, and the producers of their first cells.
    last: [n] and first: [waits] indices into ``cells``; ranks: [waits] the ranks that wait.
    """

    full: Int64
    cells: Int64
    last: Int64
    first: list[int]
    ranks: list[int]


@kept
def _watched(dependencies: Dependencies) -> _Watched:
    low, high = dependencies.rank_start[:-1], dependencies.rank_start[1:]
    full = np.flatnonzero(low < high)
    far = dependencies.remote[:, low[full]]
    waits, ranks = dependencies.producers[:, low[full]][far], np.broadcast_to(full, far.shape)[far]
    cells, place = np.unique(np.concatenate([high[full] - 1, waits]), return_inverse=True)
    return _Watched(full, cells, place[: full.size], place[full.size :].tolist(), ranks.tolist())


def edges(dependencies: Dependencies, classes: Int64, duration: Floats, latency: Floats) -> tuple[Floats, Floats]:
    """[P, K] when each rank's first cell starts, and when its last ends.

    classes: [cells] class of every cell; duration: [classes, K] the time of a cell by its class; latency: [K].
    """
    watched, (walk, instruction) = _watched(dependencies), closed_cells(dependencies)
    add = np.empty(len(dependencies), np.int32)
    add[instruction] = classes
    lags = np.stack([np.zeros_like(latency), latency])
    ends = run(walk, lags, duration, add=add, watch=instruction[watched.cells])
    begin, end = np.zeros((2, dependencies.rank_start.size - 1, latency.size))
    end[watched.full] = ends[watched.last]
    for rank, row in zip(watched.ranks, watched.first, strict=True):
        np.maximum(begin[rank], ends[row] + latency, out=begin[rank])
    return begin, end
