"""Prices a step of given rows: as they come, in the order that a search finds, and what no order undercuts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from schedc.elaborate.sizes import segments_per_microbatch
from schedc.ir.arrays import Floats, Int64
from schedc.plan.passes import Step, lower
from schedc.plan.price_cells import op_times
from schedc.source import Source
from schedc.step.cells.row_bound_inside import row_bound_inside
from schedc.step.costs.costs import Costs
from schedc.step.costs.row_costs import microbatch_costs
from schedc.step.row_bound import row_bound
from schedc.step.row_order import TRIES, MicrobatchPricer, order_microbatches, repeat_segments, whole_costs
from schedc.step.unequal import CellParts

_PRICES = frozenset({"times", "times of works", "predict", "inside"})
"""The passes whose results follow from factors of microbatches, where the order is kept."""


@dataclass(frozen=True, eq=False)
class RowPrices:
    """A step of given rows. Times are in the unit of the step's costs. Those are of a microbatch of mean cost.

    costs: [1 or stages, microbatches] costs of microbatches over their mean, as they come.
    order: [microbatches] the microbatch at each place.
    equal: the step of microbatches that all cost the mean. given: as they come. ordered: in the order.
    bound: what no order undercuts, nor any order inside cells.
    """

    costs: Floats
    order: Int64
    equal: float
    given: float
    ordered: float
    bound: float


def price_rows(step: Step, source: Source, rows: Floats, tries: int = TRIES) -> RowPrices:
    """The prices of a step with a timeline, in its order of cells and with its works.

    source, rows: [rows, 1 or stages] costs of a text, by `load_row_costs`. Raises `DiagnosticError` (S412) for
    rows that do not fit.
    """
    schedule = step.schedule
    segments = 1 if step.tree is None else segments_per_microbatch(step.tree, schedule.sizes)
    costs = microbatch_costs(rows, source, schedule.microbatches // segments, schedule.stages)
    parts, latency = _parts(step)
    order = order_microbatches(whole_costs(costs), MicrobatchPricer.rounded(parts, latency, segments), tries)
    if step.inside is None:
        bound = row_bound(parts, latency, costs, segments)
    else:
        bound = row_bound_inside(step.inside, costs, segments)

    def priced(costs: Floats) -> float:
        return _makespan(step, replace(step.costs, microbatches=_factors(repeat_segments(costs, segments))))

    equal = _makespan(step, replace(step.costs, microbatches=()))
    return RowPrices(costs, order, equal, priced(costs), priced(costs[:, order]), bound)


def _parts(step: Step) -> tuple[CellParts, float]:
    """The times of cells of mean cost by which orders are searched, and that of a message.

    Where costs have a table of cells, messages leave at the ends of cells.
    """
    stage_costs = step.costs.resolved(step.schedule.stages)
    if step.inside is None:
        return CellParts.of(step.dependencies, stage_costs), stage_costs.p2p
    schedule = step.schedule
    alone = np.array(op_times(schedule, step.costs).alone)[schedule.kind, schedule.stage]
    return CellParts(step.dependencies, step.inside.closed.duration, alone), stage_costs.p2p


def _makespan(step: Step, costs: Costs) -> float:
    again = replace(step.under(costs), done=step.done - _PRICES)
    return lower(again, "predicted").predicted.makespan


def _factors(costs: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, costs.tolist()))
