"""A step below which no order of unequal microbatches comes, whatever the orders inside cells.

Delays of cells are bounded from below (`schedc.cell.bounds`), at the factor of each half. Messages leave as soon as
these bounds allow.

    others        rank                                            others
    |--- cheapest ---|--- its least work of all microbatches ---|--- cheapest ---|
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedc.cell.bounds import delay_bounds
from schedc.cell.graph import QUEUES, Lane
from schedc.cell.program import graph_of
from schedc.cell.tasks import Tasks, tasks_of
from schedc.ir.arrays import Floats, Int64, bincount
from schedc.step.cells.cell_forms import CellForm
from schedc.step.cells.cell_pricing import CellPricing
from schedc.step.dependencies import Dependencies
from schedc.step.messages import message_makespans, simulate_messages
from schedc.step.row_bound import MOST, dearest_among_cheapest, least_work
from schedc.step.row_order import repeat_segments
from schedc.step.unequal import CellParts

_COMPUTE = QUEUES.index(Lane.COMPUTE)


def row_bound_inside(pricing: CellPricing, costs: Floats, segments: int = 1) -> float:
    """A time that no order undercuts, in the unit of ``pricing``: the larger one of the two bounds of `row_bound`.

    costs, segments: as there. Factors of microbatches in ``pricing`` are left out.
    """
    return max(_of_ranks(pricing, costs, segments), _one_among(pricing, costs, segments))


def _of_ranks(pricing: CellPricing, costs: Floats, segments: int) -> float:
    """The longest, over ranks: the begin of the first cell, the least work, and what is behind the begin of the last.

    The last cell ends the step itself, or its messages let others end it: the longer one counts.
    """
    known, factors = pricing.dependencies, repeat_segments(costs, segments)
    least = float(factors.min())
    cheapest = _delays(pricing, np.full((2, len(known), 1), least))
    step = simulate_messages(known, np.arange(len(known)), np.zeros(len(known)), cheapest[..., 0], pricing.p2p).timeline
    start = known.rank_start
    ranks = np.flatnonzero(start[:-1] + 1 < start[1:])
    if not ranks.size:
        return step.makespan
    first, last = start[ranks], start[ranks + 1] - 1
    behind_first, in_front = _at_the_ends(pricing)
    whole = _linear_work(pricing)
    whole[first] = np.where(known.pairs[first, None], 0.0, behind_first[first])
    sent = whole.copy()
    sent[last] = np.where(known.pairs[last, None], 0.0, in_front[last])
    begun = step.end[first] - least * whole[first].sum(axis=1)
    behind = _behind(pricing, cheapest, step.end, last) - least * sent[last].sum(axis=1)
    ends = [least_work(_parts(known, work), factors)[ranks] + more for work, more in ((whole, 0.0), (sent, behind))]
    return float(max(step.makespan, *(begun + np.maximum(*ends))))


def _behind(pricing: CellPricing, cheapest: Floats, end: Floats, last: Int64) -> Floats:
    """[ranks] the least time from when a rank is free for its last cell to the end of the step.

    In the step of each column that cell begins later than the whole step ends. cheapest: [cells, 3, 3, 1] delays.
    end: [cells] under them. last: [ranks] cells.
    """
    columns, later = np.arange(last.size), float(end.max()) + 1.0
    delays = np.tile(cheapest, last.size)
    delays[last, :, 0, columns] += later
    ends = message_makespans(pricing.dependencies, np.arange(end.size), delays, np.full(last.size, pricing.p2p))
    return np.asarray(ends - later - end[last - 1])


def _one_among(pricing: CellPricing, costs: Floats, segments: int) -> float:
    """The least step, over places, of the dearest microbatch there and cheapest ones at all others; 0 if too many."""
    known, places = pricing.dependencies, costs.shape[1]
    if 9 * places * len(known) > MOST:
        return 0.0
    factors = dearest_among_cheapest(costs, segments)
    delays = _delays(pricing, _of_halves(known, factors))
    return float(message_makespans(known, np.arange(len(known)), delays, np.full(places, pricing.p2p)).min())


def _of_halves(known: Dependencies, factors: Floats) -> Floats:
    """[2, cells, K] factors of both ops of cells, the same one twice for one op. factors: [1 or stages, M, K]."""
    stage, microbatch = known.schedule.stage, known.schedule.microbatch
    rows = known.first, np.where(known.second >= 0, known.second, known.first)
    return np.stack([factors[np.minimum(stage[op], len(factors) - 1), microbatch[op]] for op in rows])


def _delays(pricing: CellPricing, factors: Floats) -> Floats:
    """[cells, 3, 3, K] least delays of cells whose ops take ``factors`` [2, cells, K] times as long."""
    count = factors.shape[2]
    delays = np.empty((factors.shape[1], 3, 3, count))
    for own, form, tasks, duration in _forms(pricing):
        second = [graph_of(form.kind, task.half, 0, 1) for task in tasks.all]
        times = duration[:, None] * factors[second][:, own].reshape(len(tasks), -1)
        delays[own] = np.moveaxis(delay_bounds(tasks, times).reshape(3, 3, own.size, count), 2, 0)
    return delays


def _forms(pricing: CellPricing) -> Iterator[tuple[Int64, CellForm, Tasks, Floats]]:
    """By form: its cells, its tasks, and their least times [tasks] at a factor of 1."""
    costs = pricing.least_costs
    for number, form in enumerate(pricing.kinds):
        tasks = tasks_of(form.kind, form.forward, form.backward)
        yield np.flatnonzero(pricing.kind == number), form, tasks, np.array(tasks.durations(costs, costs))


def _linear_work(pricing: CellPricing) -> Floats:
    """[cells, 2] least times of the ops of cells at a factor of 1, 0 without a second one.

    A cell of one op takes its least delay, a pair the segments of both.
    """
    work = np.zeros((len(pricing.dependencies), 2))
    for own, form, tasks, duration in _forms(pricing):
        if len(form.kind) == 1:
            work[own, 0] = delay_bounds(tasks, duration[:, None])[0, 0, 0]
            continue
        computed = np.where(np.array(tasks.queues) == _COMPUTE, duration, 0.0)
        second = np.array([graph_of(form.kind, task.half, 0, 1) for task in tasks.all])
        work[own] = bincount(second, computed, 2)
    return work


def _at_the_ends(pricing: CellPricing) -> tuple[Floats, Floats]:
    """[cells, 2] twice: the least delay of a cell's end, and of what it sends, at a factor of 1.

    The first is from any of its arrivals, the second from when its rank is free. The second columns are 0.
    """
    ends, sent = np.zeros((2, len(pricing.dependencies), 2))
    for own, _, tasks, duration in _forms(pricing):
        delays = delay_bounds(tasks, duration[:, None])[..., 0]
        ends[own, 0] = delays[0][delays[0] > -np.inf].min()
        sent[own, 0] = delays[:, 0].min()
    return ends, sent


def _parts(known: Dependencies, work: Floats) -> CellParts:
    """Cells whose ops take ``work`` [cells, 2], each times its own factor."""
    ops = np.zeros(len(known.schedule))
    ops[known.first] = work[:, 0]
    ops[known.second[known.pairs]] = work[known.pairs, 1]
    return CellParts(known, work.sum(axis=1), ops)
