"""Two priced plans of a small model, and the folder that a search writes of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, price_plan
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import all_schedules
from schedc.planner.times.problem import PlanProblem
from schedc.report.plan_output import write_plans
from schedc.report.priced_plans import plan_facts
from schedc.report.problem import problem_facts
from support.plan_facts import search_facts

GPT2 = PlanProblem(open_model("gpt2").at(1024), open_cluster("h100", 8), 16)
AXES = (
    PlanAxes(1, 1, 2, 1, 1, 4, 1, 1, 4, "1f1b"),
    PlanAxes(2, 1, 2, 2, 1, 2, 0, 1, 8, "interleaved_1f1b", recompute="layer", where="chunk0"),
)


@cache
def small_plans() -> tuple[PricedPlan, ...]:
    """One plan for each of `AXES`."""
    choices = {choice.name: choice for choice in all_schedules()[0]}
    splits = [axes.split for axes in AXES]
    table = PartTable.of(GPT2, splits)
    return tuple(price_plan(PlannedStep(GPT2, axes, choices[axes.schedule], table)) for axes in AXES)


def written_plans(folder: Path) -> Path:
    """The folder with these plans, as a search writes it."""
    entries = [plan_facts(plan, place, (), 0.0) for place, plan in enumerate(small_plans(), 1)]
    write_plans(folder, False, search_facts(*entries) | problem_facts(GPT2, None), small_plans())
    return folder
