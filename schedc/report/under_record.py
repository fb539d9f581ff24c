"""Adds what a record of the routing says to the facts of a search: the copies of each plan, and what was refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedc.cell.recorded_rows import RecordedRows
    from schedc.planner.price.priced import PricedPlan
    from schedc.planner.search.under_record import SearchUnderRecord
    from schedc.planner.times.problem import PlanProblem


def record_facts(under: SearchUnderRecord, record: RecordedRows, problem: PlanProblem) -> dict[str, Any]:
    """The record, and what a search under it refused.

    fullest: by ranks of a group, rows of the fullest over the mean: alone, and with the best copies. priced: plans of
    the search that were priced with copies.
    """
    alone, best = dict(problem.recorded), dict(problem.copied)
    return {
        "file": record.file,
        **record.sizes._asdict(),
        "fullest": [{"ranks": ranks, "alone": alone[ranks], "copied": rho} for ranks, rho in best.items()],
        "priced": under.priced,
        "refused": [{"way": way, "why": why, "plans": plans} for (way, why), plans in under.refused.items()],
        "unpriced": [{"why": why, "plans": plans} for why, plans in under.unpriced.items()],
    }


def copies_of_plan(plan: PricedPlan) -> dict[str, Any]:
    """The way to copy experts, its line in the plan file, and the prices of all ways; null where nothing is shared."""
    from schedc.planner.price.copies import LINES
    from schedc.report.choices import balance_facts

    way = "none" if plan.ways is None else plan.ways.chosen.name
    return {"copies": way, "line": LINES[way], "balance": None if plan.ways is None else balance_facts(plan.ways)}


def record_texts(facts: Mapping[str, Any]) -> Iterator[str]:
    """What the record says of the best plan, and which ways to copy experts were refused."""
    record, plans = facts.get("record"), facts["plans"]
    if record is None:
        return
    if plans and plans[0]["balance"] is not None:
        yield f"copies of experts in {plans[0]['file'].partition('.')[0]}: {', '.join(_ways(plans[0]['balance']))}"
    for each in record["refused"]:
        yield f"copies {each['way']} are refused in {each['plans']} of {record['priced']} plans priced: {each['why']}"
    for each in record["unpriced"]:
        yield f"{each['plans']} of the plans found were not priced: {each['why']}"


def _ways(balance: Mapping[str, Any]) -> Iterator[str]:
    """Each way with its pipeline and its fullest rank, the chosen one first."""
    rows = [row for row in balance["candidates"] if not row["refused"]]
    for row in sorted(rows, key=lambda row: (row["name"] != balance["chosen"], row["makespan"])):
        yield f"{row['name']} {row['makespan']:.4g} s (fullest rank {row['copies']['after']['mean']:.3f})"
