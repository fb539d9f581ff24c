"""Prices a plan under each way to copy experts, by a record of the routing: the fastest way that fits into memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from schedc.cell.recorded_rows import RecordedRows
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import Balance
from schedc.plan.candidates import SAME_STEP, ChosenBalance, PricedCandidate
from schedc.plan.choose_balance import price_ways
from schedc.plan.passes import lower
from schedc.planner.price.copies import PlannedCopies, no_copies
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.orders import KnownOrder
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, opened_files, pipeline_seconds, price_plan
from schedc.planner.price.stage_columns import StageColumns
from schedc.planner.price.states import OutsidePipeline
from schedc.planner.space.axes import PlanAxes

PAIRS_IN_TURN = "pairs run one op after the other, and rows by rank are priced in pairs that overlap"


@dataclass(frozen=True, eq=False)
class PlanUnderRecord:
    """A plan under a record. priced: None where it is not priced, or no way to copy experts fits. refused: why not."""

    priced: PricedPlan | None
    refused: str = ""


PricedWays = dict[PlanAxes, tuple[PricedCandidate, ...]]
"""By axes of a pipeline with ``zero`` 0, the ways to copy experts in it."""


def price_under(planned: PlannedStep, record: RecordedRows, known: PricedWays) -> PlanUnderRecord:
    """The price of a plan whose experts have the rows of a record, copied in the fastest way that fits.

    planned: of any rows. known: ways that were priced; gets those of the plan.

    Raises `DiagnosticError` for sizes that the schedule refuses.
    """
    even = _with_rows(planned, 1.0)
    if planned.axes.ep == 1:
        return PlanUnderRecord(price_plan(even))
    if planned.choice.has_pairs and not planned.axes.overlap:
        return PlanUnderRecord(None, PAIRS_IN_TURN)
    even = replace(even, copies=PlannedCopies("none", record))
    pipeline = replace(planned.axes, zero=0)
    if pipeline not in known:
        refused = no_copies(planned.axes.tp, planned.axes.cp)
        known[pipeline] = price_ways(lower(opened_files(even), "plan"), Balance("auto"), refused)
    ways = list(known[pipeline])
    while (chosen := _shortest(ways)) is not None:
        assert chosen.copies is not None
        with_copies = replace(even, copies=PlannedCopies(chosen.name, record))
        try:
            priced = _priced(with_copies, chosen)
        except DiagnosticError as error:
            ways = _without(ways, chosen, error.diagnostics[0].message)
            continue
        if priced.fits:
            balance = ChosenBalance(tuple(ways), chosen)
            return PlanUnderRecord(replace(priced, ways=balance, notes=(_why(balance),)))
        ways = _without(ways, chosen, f"the fullest rank needs more than {priced.usable / 1e9:.4g} GB")
    why = dict.fromkeys(each.refused for each in ways)
    return PlanUnderRecord(None, f"no way to copy experts can be: {'; '.join(why)}")


def _with_rows(planned: PlannedStep, fullest: float) -> PlannedStep:
    """The plan with so many rows on the fullest rank, over the mean, in its own table."""
    problem = replace(planned.problem.even, skew=fullest)
    table = PartTable.of(problem, [planned.axes.split])
    return replace(planned, problem=problem, table=table, placed=planned.layout, number=None)


def _shortest(ways: list[PricedCandidate]) -> PricedCandidate | None:
    """The first of the shortest steps; None where all ways are refused."""
    open_ways = [each for each in ways if not each.refused]
    least = min((each.makespan for each in open_ways), default=np.inf)
    return next((each for each in open_ways if each.makespan <= least * (1 + SAME_STEP)), None)


def _without(ways: list[PricedCandidate], one: PricedCandidate, why: str) -> list[PricedCandidate]:
    return [replace(each, refused=why) if each is one else each for each in ways]


def _priced(planned: PlannedStep, way: PricedCandidate) -> PricedPlan:
    """The plan with the memory that the compiler reads from its files. Its fullest rank holds the rows of the way."""
    assert way.copies is not None
    fullest, free = way.copies["after"]["worst"], planned.problem.stack.free_steps
    step = lower(opened_files(planned), "memory", *(("predicted",) if free else ()))
    order = KnownOrder(step.dependencies)
    columns, makespan = StageColumns.of_plans([planned]), way.makespan
    if free:
        makespan = pipeline_seconds(planned, step.predicted)
    beside = columns.beside(np.array([[makespan]]))
    of_plan = OutsidePipeline(*(np.asarray(seconds).item() for seconds in beside))
    fuller = StageColumns.of_plans([_with_rows(planned, min(fullest, float(planned.axes.ep)))])
    reserve = float(fuller.peaks(order)[0] - columns.rank_bytes(order)[:, 0].max())
    peaks = tuple(step.memory.peak_memory.tolist())
    return PricedPlan(planned, makespan, of_plan, peaks, reserve, order.digest)


def _why(ways: ChosenBalance) -> str:
    """Which way to copy experts is the fastest, as a sentence for a plan file."""
    chosen = ways.chosen
    others = [each for each in ways.candidates if not each.refused and each is not chosen]
    if not others:
        return f"Copies of experts: {chosen.name}; no other way is legal here, or none fits."
    second = min(others, key=lambda each: each.makespan)
    gain = second.makespan / chosen.makespan - 1
    than = f"{100 * gain:.1f} % shorter than" if gain > SAME_STEP else "as short as"
    return f"Copies of experts: {chosen.name}, a pipeline {than} {second.name}."
