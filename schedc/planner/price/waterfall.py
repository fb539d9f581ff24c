"""Where the time of a plan goes: one cause after the other enters the model, and each bar is what the step grows by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.plan import Level
from schedc.model.counts import model_flops
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import PricedPlan, order_of, pipeline_of, pipeline_seconds
from schedc.planner.times.problem import PlanProblem

_ROUNDING = 1e-12
"""Differences of sums that are no larger, relatively, are none."""

_ENDLESS = 1e30
"""A share of a link over which everything arrives at once."""


class Bar(NamedTuple):
    """A cause, and the seconds by which a step grows when the cause enters the model."""

    what: str
    seconds: float


def waterfall(plan: PricedPlan) -> tuple[Bar, ...]:
    """The bars of a plan, which add up to its step.

    Each is the difference of two evaluations of one model, the later with one cause more. Up to the exchanges of
    experts an evaluation is the time in which ranks work; from the bubbles on it is that of the order.
    """
    reached = 0.0
    bars = []
    for what, seconds in evaluations(plan):
        grown = seconds - reached
        bars.append(Bar(what, grown if abs(grown) > _ROUNDING * seconds else 0.0))
        reached = seconds
    return tuple(bars)


def ideal_seconds(problem: PlanProblem, count: int) -> float:
    """Seconds of a step on ``count`` devices at their peak: products of the model, forward and twice backward."""
    flops = model_flops(problem.model, problem.model.seq)
    devices = count * problem.cluster.peak(problem.precision)
    return 3.0 * (flops.total + flops.mtp) * problem.tokens / devices


def mfu(plan: PricedPlan) -> float:
    """Share of the peak that the products of the model take in a step, predictions included.

    Spare devices of a domain count, as they do in device-hours.
    """
    return ideal_seconds(plan.planned.problem, plan.occupied) / plan.step


_NO_TENSOR = {"tp": _ENDLESS, "tp_nodes": _ENDLESS, "tp_alpha": 0.0}
_NO_CONTEXT = {"cp": _ENDLESS}
_NO_EXPERTS = {"ep": _ENDLESS, "ep_alpha": 0.0, "ep_peer": 0.0}
_NO_EXCHANGE = _NO_TENSOR | _NO_CONTEXT | _NO_EXPERTS
_NO_MEMORY = {"hbm": _ENDLESS, "launch": 0.0, "chunk": 0.0}


def evaluations(plan: PricedPlan) -> Iterator[tuple[str, float]]:
    """Causes in the order in which they enter, with the seconds of the step that has them. The last is the plan's.

    All have the order of the plan, so that no cause makes a step shorter.
    """
    planned = plan.planned
    order = order_of(planned)
    none = replace(planned.axes, recompute=str(Level.NONE), where="all")

    def busy(planned: PlannedStep) -> Floats:
        """[P] seconds in which ranks work."""
        return pipeline_of(_without_messages(planned), order).busy

    def pipeline(planned: PlannedStep) -> float:
        return pipeline_seconds(planned, pipeline_of(planned, order))

    yield "ideal", ideal_seconds(planned.problem, planned.axes.devices)
    alone = _with(planned, _NO_EXCHANGE | _NO_MEMORY, planned.problem.even)
    yield "efficiency of products", float(busy(replace(alone, axes=none)).mean())
    alone = _with(planned, _NO_EXCHANGE, planned.problem.even)
    yield "memory-bound ops and launches", float(busy(replace(alone, axes=none)).mean())
    yield "recomputation", float(busy(alone).mean())
    skewed = busy(_with(planned, _NO_EXCHANGE))
    yield "expert imbalance", float(skewed.mean())
    yield "layout imbalance", float(skewed.max())
    yield "tensor exchanges", float(busy(_with(planned, _NO_CONTEXT | _NO_EXPERTS)).max())
    with_experts = _with(planned, _NO_CONTEXT)
    yield "expert exchanges", float(busy(with_experts).max())
    yield "bubbles", pipeline(_without_messages(with_experts))
    yield "messages", pipeline(with_experts)
    if planned.copies is not None:
        yield "context exchanges", pipeline(planned)
        yield "rows by rank, copies of experts", plan.makespan
    else:
        yield "context exchanges", plan.makespan
    step = plan.makespan
    for what, seconds in zip(("sums of gradients", "optimizer", "host of a step"), plan.beside, strict=True):
        step += float(seconds)
        yield what, step


def _with(planned: PlannedStep, constants: Mapping[str, float], problem: PlanProblem | None = None) -> PlannedStep:
    """The plan on machines with other constants, in the layout that it has."""
    problem = problem or planned.problem
    other = replace(problem, constants={**problem.constants, **constants})
    return replace(planned, problem=other, table=PartTable.of(other, [planned.axes.split]), placed=planned.layout)


def _without_messages(planned: PlannedStep) -> PlannedStep:
    return replace(planned, table=replace(planned.table, p2p=np.zeros_like(planned.table.p2p)), placed=planned.layout)
