"""Where the time of a plan goes: one cause after the other enters the model, and each bar is what the step grows by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.model.counts import model_flops
from schedc.plan.layout.compare import load_per_rank
from schedc.plan.layout.parts import WORK
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import OP, PartTable
from schedc.planner.price.priced import PricedPlan, order_of, pipeline_of
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
    experts an evaluation is the work of the ranks; from the bubbles on it is the makespan of the order.
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
    """Causes in the order in which they enter, with the seconds of the step that has them. The last is the plan's."""
    planned = plan.planned
    even = replace(planned.problem, skew=1.0, spread=0.0)
    yield "ideal", ideal_seconds(planned.problem, planned.axes.devices)
    yield "efficiency of products", _mean_work(_with(planned, _NO_EXCHANGE | _NO_MEMORY, even), False)
    yield "memory-bound ops and launches", _mean_work(_with(planned, _NO_EXCHANGE, even), False)
    yield "recomputation", _mean_work(_with(planned, _NO_EXCHANGE, even), True)
    yield "expert imbalance", _mean_work(_with(planned, _NO_EXCHANGE), True)
    yield "layout imbalance", float(_work(_with(planned, _NO_EXCHANGE), True).max())
    yield "tensor exchanges", float(_work(_with(planned, _NO_CONTEXT | _NO_EXPERTS), True).max())
    alone = _without_messages(_with(planned, _NO_CONTEXT))
    line = pipeline_of(alone, order_of(alone))
    yield "expert exchanges", float(line.busy.max())
    yield "bubbles", line.makespan
    with_messages = _with(planned, _NO_CONTEXT)
    messages = planned.axes.cp > 1
    yield "messages", pipeline_of(with_messages, order_of(with_messages)).makespan if messages else plan.makespan
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


def _work(planned: PlannedStep, recomputes: bool) -> Floats:
    """[P] seconds of the work of each rank, all segments one after the other."""
    table, row = planned.table, planned.row
    counts = np.append(planned.layout.counts[:, : len(WORK)], np.ones((planned.placement.stages, 1)), axis=1)
    factor = np.append(np.full(OP, table.split_factor(planned.choice.splits)), 1.0)
    stages = counts @ (table.forward[row] + factor * (table.input[row] + table.weight[row]))
    if recomputes:
        stages = stages + (counts[:, :OP] * table.recompute_seconds[row][planned.levels]).sum(axis=1)
    return planned.axes.microbatches * load_per_rank(planned.placement, stages)


def _mean_work(planned: PlannedStep, recomputes: bool) -> float:
    return float(_work(planned, recomputes).mean())
