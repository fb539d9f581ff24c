"""Which software runs a plan: this runtime, megatron-core and torchtitan, each by its own rules."""

from __future__ import annotations

from dataclasses import replace

from schedc.compiler import price
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.interchange.refusals import no_segments
from schedc.interchange.targets import TARGETS
from schedc.load.library import Text
from schedc.plan.apply import layout_of_plan
from schedc.plan.passes import Step
from schedc.planner.price.priced import PricedPlan
from schedc.source import Source
from schedc.syntax.input import AppliedPlan

RunsOn = dict[str, str | None]
"""By software: None where it runs a plan, else the first reason why it does not."""

EXPORTED = {"megatron-core": "megatron", "torchtitan": "torchtitan"}
"""By software, the target of `schedc export` whose refusals are its rules."""


def runs_on(plan: PricedPlan) -> RunsOn:
    """Which software runs a plan, from the files of the plan.

    The rules of this runtime are `Parallel.refusal`. The rules of the others are the refusals of `schedc export`.
    """
    tree = open_input(Text(Source("planned.sched", plan.plan_text), "planned"))
    assert isinstance(tree, AppliedPlan)
    step = price(tree, {}, plan.planned.costs())
    parallel = step.schedule.plan.parallel
    refusal = None if parallel is None else parallel.refusal
    exported = {name: _refused(target, tree, step, plan.planned.choice.name) for name, target in EXPORTED.items()}
    return {"schedc": refusal and refusal[0]} | exported


def _refused(target: str, tree: AppliedPlan, step: Step, schedule: str) -> str | None:
    """The first refusal of a target, with its reason; None for what it writes. schedule: the name in its words."""
    order = replace(step.schedule, name=schedule)
    try:
        no_segments(tree.parameters, order, target)
        TARGETS[target].write(order, step.costs, step.works, layout_of_plan(tree.tree, order))
    except DiagnosticError as error:
        first = error.diagnostics[0]
        return ": ".join([first.message, *first.notes[:1]])
    return None
