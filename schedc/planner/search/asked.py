"""Searches the best plan that has some axes, inside of a space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.result import FoundPlan
from schedc.planner.search.standing import SearchProgress
from schedc.planner.space.conditions import PlanCondition
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem


def best_plan(
    space: PlanSpace,
    problem: PlanProblem,
    wanted: Sequence[PlanCondition],
    options: SearchOptions,
    progress: SearchProgress,
) -> FoundPlan | None:
    """The best plan that meets conditions; None where the search for it ended early. Raises as `search`."""
    part = replace(space, conditions=(*space.conditions, *wanted))
    plans = search(part, problem, replace(options, top=1), progress).plans
    return next((plan for plan in plans if plan.priced is not None), None)
