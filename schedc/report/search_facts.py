"""The facts of a search for plans: what `schedc plan --json` prints, and `plans.json` holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite, prod
from typing import Any

from schedc.planner.answers.budget import TrainingAsked, TrainingBudget, training_budget
from schedc.planner.answers.ramp import ramp_steps
from schedc.planner.answers.runs_on import runs_on
from schedc.planner.answers.slow_devices import SlowDevices
from schedc.planner.answers.space_facts import axis_ends, space_facts
from schedc.planner.fit.fitted import Fit, beyond
from schedc.planner.price.priced import PricedPlan
from schedc.planner.search.result import FoundPlan, SearchResult
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.space import PlanSpace
from schedc.planner.times.problem import PlanProblem
from schedc.report.certificate import certificate_text
from schedc.report.priced_plans import plan_facts
from schedc.report.problem import problem_facts, rows_of_plans
from schedc.report.space import restrictions, table_json
from schedc.report.under_record import copies_of_plan

NOT_COMPARED: dict[str, Any] = {"chances": None, "decided_by": [], "measure_next": []}
"""Facts of a search whose plans were not compared under draws."""


def search_to_json(
    problem: PlanProblem,
    searched: PlanSpace,
    found: SearchResult,
    also: Mapping[str, FoundPlan],
    fit: Fit | None,
    objective: str,
    asked: TrainingAsked | None = None,
    slow: SlowDevices | None = None,
    record: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The facts of a search: its problem, its counts, what is certain, and its plans, best first.

    searched: the plans that were searched. also: plans beside those found, by their axes as they were asked for.
    objective: what is best, `step`, `memory` or `pareto`. asked: the training run, whose budget each plan then has.
    slow: devices that are slow, with which each plan then has its step. record: its facts, if plans have its copies.
    """
    plans = [_entry(plan, place, asked, slow, record is not None) for place, plan in enumerate(found.plans, 1)]
    files = {plan.axes: entry["file"] for plan, entry in zip(found.plans, plans, strict=True)}
    space, table = found.space, space_facts(searched, problem)
    facts: dict[str, Any] = {
        "schema": "schedc.plans",
        "version": 1,
        **problem_facts(problem, fit),
        "objective": objective,
        "training": asked and _asked_facts(asked),
        "slow": slow and {"factor": slow.factor, "devices": slow.devices},
        "space": {
            "raw": space.raw,
            "legal": space.legal,
            "fit": space.fit,
            "restrictions": [*restrictions(table, searched.conditions), *rows_of_plans(problem)],
            "facts": table_json(table),
        },
        "counts": asdict(found.counts),
        "seconds": asdict(found.seconds),
        "certificate": asdict(found.certificate) | {"bound_s": _finite(found.certificate.bound_s)},
        "plans": plans,
        "also": [
            _entry(plan, 1, asked, slow) | {"file": f"also {place}" if place > 1 else "also", "asked": texts}
            for place, (texts, plan) in enumerate(also.items(), 1)
        ],
        **NOT_COMPARED,
        "axis_ends": [end for plan in found.plans[:1] for end in axis_ends(table, plan.axes, plan.free)],
        "pareto": [_point(plan, files) for plan in found.pareto],
        "extrapolates": extrapolated(fit, plans),
        "left_out": [{"schedule": each.schedule, "reason": each.reason} for each in space.left_out],
    } | ({} if record is None else {"record": record})
    facts["certificate"]["sentence"] = certificate_text(facts)
    return facts


def _point(plan: FoundPlan, files: Mapping[PlanAxes, str]) -> dict[str, Any]:
    return {"step_s": plan.step_s, "bytes": plan.peak_bytes, "file": files.get(plan.axes, "")}


def _finite(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None


def budget_facts(asked: TrainingAsked, plan: PricedPlan, entry: dict[str, Any]) -> dict[str, Any]:
    """The training run by a plan. entry: its step and interval. ramp: its sizes; empty without.

    days_low, days_high: for the ends of the step's interval, which the steps of a ramp share.
    """
    ramp = () if asked.ramp is None else ramp_steps(asked.ramp, plan)
    ranks = prod(entry["axes"][axis] for axis in ("tp", "cp", "pp", "dp"))

    def budget(step_s: float) -> TrainingBudget:
        longer = [each._replace(step_s=each.step_s and each.step_s * step_s / plan.step) for each in ramp]
        return training_budget(asked, plan.planned.problem, step_s, ranks, entry["devices"], longer)

    ends = {f"days_{end}": budget(entry[f"step_{end}_s"]).days for end in ("low", "high")}
    return budget(plan.step)._asdict() | ends | {"ramp": [each._asdict() for each in ramp]}


def _asked_facts(asked: TrainingAsked) -> dict[str, Any]:
    return asked._asdict() | {"ramp": asked.ramp and asked.ramp._asdict()}


def slow_facts(slow: SlowDevices, plan: PricedPlan) -> dict[str, Any]:
    """The step of a plan with slow devices. without: the plan without their nodes; null where there is none."""
    step = slow.step(plan)
    return step._asdict() | {"ranks": list(step.ranks), "without": step.without and step.without._asdict()}


def _entry(
    plan: FoundPlan, place: int, asked: TrainingAsked | None, slow: SlowDevices | None, copies: bool = False
) -> dict[str, Any]:
    """A plan with its answers. What draws say of it comes later, by `schedc.report.chances`.

    copies: whether it was priced with copies of experts.
    """
    assert plan.priced is not None
    entry = plan_facts(plan.priced, place, list(plan.free), plan.floor_s)
    return entry | {
        "runs_on": runs_on(plan.priced),
        "budget": asked and budget_facts(asked, plan.priced, entry),
        "slow": slow and slow_facts(slow, plan.priced),
        **dict.fromkeys(("first_in", "within_5_pct", "loss_pct")),
        **(copies_of_plan(plan.priced) if copies else {}),
    }


def extrapolated(fit: Fit | None, plans: Sequence[dict[str, Any]]) -> list[str]:
    """The sizes of these plans that no row of the fit has, each once."""
    if fit is None:
        return []
    return list(dict.fromkeys(size for plan in plans for size in beyond(fit.seen, plan["axes"])))
