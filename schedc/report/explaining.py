"""Finds where a given plan stands: the best plan with its axes, searched for beside the whole space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedc.diagnostics import RequestError
from schedc.planner.search.asked import best_plan
from schedc.planner.search.best_first import SearchOptions
from schedc.planner.search.result import FoundPlan
from schedc.planner.search.standing import SearchProgress
from schedc.planner.space.conditions import PlanCondition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from schedc.report.plans import PlanFacts
from schedc.report.priced_plans import plan_facts
from schedc.report.waterfalls import to_json as compared

_NOTHING_FITS = "S714"


def explain_plan(
    space: PlanSpace,
    problem: PlanProblem,
    wanted: Sequence[PlanCondition],
    options: SearchOptions,
    plans: Sequence[PlanFacts],
    progress: SearchProgress,
) -> tuple[dict[str, Any], FoundPlan | None]:
    """The ``explain`` of a search's JSON, as `schedc.report.explained` describes it, and the plan if there is one.

    wanted: conditions that say the axes of the plan; of several plans that meet them the best one is explained. plans:
    the best plans of the whole space, in their JSON form. progress: as for `search`.
    """
    asked = ", ".join(condition.text for condition in wanted)
    try:
        found = best_plan(space, problem, wanted, options, progress)
    except RequestError as error:
        (finding, *_) = error.diagnostics
        reason = ": ".join([finding.message, *finding.notes])
        return _absent(asked, legal=finding.code == _NOTHING_FITS, reason=reason), None
    if found is None or found.priced is None:
        return _absent(asked, legal=True, reason="the search for it ended early"), None
    plan = plan_facts(found.priced, 1, list(found.free), found.floor_s)
    return _stands(asked, plan, plans), found


def _stands(asked: str, plan: PlanFacts, plans: Sequence[PlanFacts]) -> dict[str, Any]:
    """The facts of a plan beside the best ones."""
    best = plans[0] if plans else plan
    comparison = compared(plan, best)
    return {
        "asked": asked,
        "axes": plan["axes"],
        "legal": True,
        "fits": True,
        "reason": "",
        "step_s": plan["step_s"],
        "tokens_per_s_per_device": plan["tokens_per_s_per_device"],
        "needed_bytes": plan["memory"]["needed_bytes"],
        "gap_pct": 100.0 * (plan["step_s"] / best["step_s"] - 1.0),
        "rank": _rank(plan, plans),
        "among": len(plans),
        "differs": comparison["axes"],
        "why": [{"what": bar["what"], "seconds": -bar["difference_s"]} for bar in comparison["bars"]],
        "waterfall": plan["waterfall"],
    }


def _absent(asked: str, legal: bool, reason: str) -> dict[str, Any]:
    """The facts of a plan that is not in the space, or that fits into no device."""
    nothing: dict[str, Any] = {"step_s": None, "needed_bytes": None, "gap_pct": None, "rank": None}
    lists: dict[str, Any] = {"axes": {}, "differs": {}, "why": []}
    return {"asked": asked, "legal": legal, "fits": False, "reason": reason, **nothing, **lists}


def _rank(plan: Mapping[str, Any], plans: Sequence[PlanFacts]) -> int | None:
    """The place of a plan among the best ones; None behind them."""
    slower = [place for place, each in enumerate(plans, 1) if each["step_s"] >= plan["step_s"] * (1 - 1e-12)]
    return slower[0] if slower else None
