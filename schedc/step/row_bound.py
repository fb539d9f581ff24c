"""A step below which no order of unequal microbatches comes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedc.ir.arrays import Floats, Int64, bincount
from schedc.step.batch import edges
from schedc.step.row_order import repeat_segments
from schedc.step.timeline import run_durations
from schedc.step.unequal import CellParts

MOST = 1 << 23
"""Times of cells and places, in all steps that run side by side to try each place of a microbatch."""


def row_bound(parts: CellParts, latency: float, costs: Floats, segments: int = 1) -> float:
    """A time that no order undercuts, in the unit of ``parts``: the larger one of two bounds.

    One is the longest, over ranks, of a rank's work with the cheapest microbatch before and behind it. The other is the
    step of the dearest microbatch among cheapest ones, at the place where this step is the shortest.

    costs: [1 or stages, microbatches] factors of microbatches in any order, which is the same on all stages.
    segments: of each microbatch along its sequence, of equal factors.
    """
    parts, factors = _growing(parts), repeat_segments(costs, segments)
    start = parts.dependencies.rank_start
    full = np.flatnonzero(start[:-1] < start[1:])
    if not full.size:
        return 0.0
    least = np.broadcast_to(factors.min(axis=1)[:, None], factors.shape)
    cheapest = parts.times(least)
    begin, end = run_durations(parts.dependencies, cheapest, latency)
    first, last = start[full], start[full + 1] - 1
    behind = _behind(parts, cheapest, latency, last, float(end.max())) - begin[last]
    of_ranks = begin[first] + least_work(parts, factors)[full] + behind
    return float(max(of_ranks.max(), _one_among(parts, latency, costs, segments)))


def _growing(parts: CellParts) -> CellParts:
    """Parts whose cells take at most as long, and never less with a larger factor.

    A pair that is given a shorter time than one of its ops alone takes less as the other op grows.
    """
    return replace(parts, ops=np.minimum(parts.ops, parts.whole[parts.dependencies.cell_of]))


def _one_among(parts: CellParts, latency: float, costs: Floats, segments: int) -> float:
    """The least step, over places, of the dearest microbatch at this place and cheapest ones at all others.

    0 where these are too many steps. Among so many microbatches no single one bounds the step.
    """
    count = costs.shape[1]
    if count * len(parts.dependencies) > MOST:
        return 0.0
    times = parts.times(dearest_among_cheapest(costs, segments))
    every = np.arange(len(parts.dependencies))
    _, end = edges(parts.dependencies, every, times, np.full(count, latency))
    return float(end.max(axis=0).min())


def dearest_among_cheapest(costs: Floats, segments: int) -> Floats:
    """[1 or stages, microbatches * segments, places] factors: the dearest microbatch at each place, else cheapest ones.

    costs: [1 or stages, microbatches].
    """
    places = np.arange(costs.shape[1])
    costs_at = np.tile(costs.min(axis=1)[:, None, None], (1, places.size, places.size))
    costs_at[:, places, places] = costs[:, costs.sum(axis=0).argmax()][:, None]
    return np.ascontiguousarray(repeat_segments(costs_at, segments).swapaxes(1, 2))


def _behind(parts: CellParts, cheapest: Floats, latency: float, last: Int64, makespan: float) -> Floats:
    """[ranks] when a step ends whose longest chain passes through a rank's last cell, which takes no time itself.

    In the step of each column that cell takes longer than the whole step, so that nothing else bounds its end.
    """
    columns, longer = np.arange(last.size), makespan + 1.0
    duration = np.tile(cheapest[:, None], (1, last.size))
    duration[last, columns] = longer
    every = np.arange(len(parts.dependencies))
    _, end = edges(parts.dependencies, every, duration, np.full(last.size, latency))
    return np.asarray(end.max(axis=0) - longer)


def least_work(parts: CellParts, factors: Floats) -> Floats:
    """[ranks] the least work of each rank under any order: large factors meet what takes a rank little time.

    What pairs save grows with the smaller of two factors, so at most with that of the first op.
    """
    known = parts.dependencies
    schedule, pairs = known.schedule, np.flatnonzero(known.pairs)
    first, second = known.first[pairs], known.second[pairs]
    saved = np.zeros(len(schedule))
    saved[first] = np.maximum(parts.ops[first] + parts.ops[second] - parts.whole[pairs], 0.0)
    # one factor for all stages: a rank's ops of a microbatch are one sum; else each stage has a sum of its own
    row = schedule.stage.astype(np.int64) if len(factors) > 1 else np.zeros(len(schedule), np.int64)
    size = (schedule.ranks, len(factors), schedule.microbatches)
    code = (schedule.rank.astype(np.int64) * size[1] + row) * size[2] + schedule.microbatch
    works, saves = (bincount(code, of, int(np.prod(size))).reshape(size) for of in (parts.ops, saved))
    ascending = np.sort(factors, axis=1)
    least = (np.sort(works, axis=2)[:, :, ::-1] * ascending).sum(axis=2)
    most = (np.sort(saves, axis=2) * ascending).sum(axis=2)
    return np.asarray((least - most).sum(axis=1))
