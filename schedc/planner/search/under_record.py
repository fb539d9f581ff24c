"""Searches plans under a record of the routing: by rows as the best copies leave them, then priced with copies.

A plan is priced under each way to copy experts in about a second, and a space has a million plans. So the space is
searched with one factor of rows for each expert group, that of the best copies, which take no time there. Then the best
plans of that search are priced, twice as many as are asked for. A record prices cells from inside, where pairs overlap.
So plans with other pairs are left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from schedc.cell.recorded_rows import RecordedRows
from schedc.cell.rows import CellRows
from schedc.cell.taken_rows import taken_for
from schedc.diagnostics import DiagnosticError
from schedc.ir.contradictions import contradictions
from schedc.ir.plan import Balance
from schedc.plan.choose_balance import WAYS
from schedc.plan.counts.copied_experts import rows_with_copies
from schedc.planner.price.part_table import PartTable, split_directives
from schedc.planner.price.price_copies import PricedWays, price_under
from schedc.planner.search.answer import pareto_front
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.result import FoundPlan, SearchResult, SearchSeconds
from schedc.planner.search.standing import SearchProgress
from schedc.planner.space.axes import RankSplit
from schedc.planner.space.conditions import EXCLUDE, read_condition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem

_TWICE, _LEAST = 2, 8
"""Plans of the search over those of the answer, and how many of them at least."""


@dataclass(frozen=True, eq=False)
class SearchUnderRecord:
    """A search under a record of the routing.

    result: its plans are priced with copies, best first. priced: plans of the search that were. refused: by a way to
    copy experts, and why it cannot be, in how many of them. unpriced: by why, plans that were not priced.
    """

    result: SearchResult
    priced: int
    refused: Mapping[tuple[str, str], int]
    unpriced: Mapping[str, int]


def problem_under(problem: PlanProblem, record: RecordedRows, groups: tuple[int, ...]) -> PlanProblem:
    """The problem of a search: by group of ranks the fullest one without copies, and with the best.

    groups: ranks that may share experts. The mean over the layers and microbatches of the record counts.
    """
    devices = problem.cluster.devices
    known = [(ranks, _fullest(problem, record, ranks)) for ranks in groups if 1 < ranks <= devices]
    alone, best = ([(ranks, each[of]) for ranks, each in known] for of in (0, 1))
    return replace(problem.even, recorded=((1, 1.0), *alone), copied=tuple(best))


def _fullest(problem: PlanProblem, record: RecordedRows, ranks: int) -> tuple[float, float]:
    """Rows of the fullest of so many ranks over the mean, without copies and with the best."""
    split = RankSplit(ep=ranks)
    costs = PartTable.of(problem.even, [split]).cell_costs(0, False)
    plan = split_directives(problem, split).plan
    layers, microbatches = record.shape[:2]
    rows = CellRows(recorded=taken_for(record, layers, microbatches, ranks, None))
    plans = [way.applied(plan, Balance("auto")) for way in WAYS]
    legal = [each for each in plans if not any(contradictions(each, ranks))]
    fullest = [float(rows_with_copies(each, costs, rows).factors.max(axis=2).mean()) for each in legal]
    return fullest[0], min(fullest)


def pairs_that_overlap(space: PlanSpace) -> PlanSpace:
    """The space without plans that share experts and whose pairs run one op after the other."""
    names = [choice.name for choice in space.offered.choices if choice.has_pairs]
    if not names:
        return space
    apart = read_condition(f"ep > 1 and not overlap and schedule in {', '.join(names)}", EXCLUDE)
    return replace(space, conditions=(*space.conditions, apart))


def search_under(
    space: PlanSpace, problem: PlanProblem, record: RecordedRows, options: SearchOptions, progress: SearchProgress
) -> SearchUnderRecord:
    """The best plans under a record. space: of `pairs_that_overlap`. problem: of `problem_under`.

    Raises as `search`.
    """
    wanted = max(_TWICE * options.top, _LEAST)
    found = search(space, problem, replace(options, top=wanted), progress)
    plans, refused, unpriced = list[FoundPlan](), Counter[tuple[str, str]](), Counter[str]()
    known: PricedWays = {}
    begun = time.process_time(), time.perf_counter()
    for number, plan in enumerate(found.plans, 1):
        progress("priced", number)
        try:
            under = price_under(plan.planned, record, known)
        except DiagnosticError as error:
            unpriced[error.diagnostics[0].message] += 1
            continue
        if (priced := under.priced) is None:
            unpriced[under.refused] += 1
            continue
        ways = () if priced.ways is None else priced.ways.candidates
        refused.update((way.name, way.refused) for way in ways if way.refused)
        exact = replace(
            plan, planned=priced.planned, step_s=priced.step, peak_bytes=priced.needed, free={}, floor_s=0.0
        )
        plans.append(replace(exact, digest=priced.digest, priced=priced))
    plans.sort(key=lambda plan: (plan.step_s, plan.peak_bytes, plan.axes))
    best = tuple(plans[: options.top])
    certificate = replace(found.certificate, complete=False, bound_s=inf, kth_s=best[-1].step_s if best else None)
    cpu, wall = time.process_time() - begun[0], time.perf_counter() - begun[1]
    seconds = found.seconds
    seconds = SearchSeconds(seconds.cpu + cpu, seconds.wall + wall, seconds.by_stage | {"copies": cpu})
    result = replace(found, plans=best, pareto=pareto_front(plans), certificate=certificate, seconds=seconds)
    return SearchUnderRecord(result, len(plans), refused, unpriced)
