"""Simulates plans in batches: those of one order share its walk, and differ in the times of their stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.orders import OrderKey
from schedc.planner.price.stage_columns import StageColumns
from schedc.planner.search.orders import Orders
from schedc.step.batch import simulate_batch


@dataclass(frozen=True, eq=False)
class SimulatedPlan:
    """A plan of a fixed order. place: its place among the candidates.

    step: seconds; exact unless exchanges run beside compute, and then a bound. peak: bytes of the fullest rank.
    digest: the one of its order. floor: the step of no order inside cells is smaller. programmed: whether ``step``
    knows the program of a kind of pairs (`with_program`).
    """

    place: int
    planned: PlannedStep
    step: float
    peak: float
    digest: bytes
    floor: float
    programmed: bool = False


@dataclass(frozen=True)
class RefusedOrder:
    """An order that the compiler refuses, and why."""

    key: OrderKey
    reason: str


def simulate_plans(
    plans: Sequence[tuple[int, PlannedStep]], orders: Orders, usable: float
) -> tuple[list[SimulatedPlan], list[RefusedOrder]]:
    """The plans that fit, given with their places. Plans of an order that the compiler refuses are left out.

    usable: bytes of a device.
    """
    groups: defaultdict[OrderKey, list[tuple[int, PlannedStep]]] = defaultdict(list)
    for place, planned in plans:
        groups[OrderKey.of(planned.axes)].append((place, planned))
    found: list[SimulatedPlan] = []
    refused: list[RefusedOrder] = []
    for key, group in groups.items():
        try:
            found += _of_one_order(key, group, orders, usable)
        except DiagnosticError as error:
            refused.append(RefusedOrder(key, error.diagnostics[0].message))
    return found, refused


def with_program(plan: SimulatedPlan, orders: Orders) -> SimulatedPlan:
    """The plan with pairs under a bound that knows more of them: the program of those that take most of the time."""
    order = orders.of(OrderKey.of(plan.planned.axes)).dependencies
    makespan = orders.floors.with_program(plan.planned, order)
    (step,) = StageColumns.of_plans([plan.planned]).steps(np.array([[makespan]]))[0].tolist()
    return replace(plan, step=max(plan.step, step), programmed=True)


def _of_one_order(
    key: OrderKey, group: list[tuple[int, PlannedStep]], orders: Orders, usable: float
) -> list[SimulatedPlan]:
    order = orders.of(key)
    plans = [planned for _, planned in group]
    peaks = StageColumns.of_plans(plans).peaks(order)
    fit = [number for number, peak in enumerate(peaks.tolist()) if peak <= usable]
    makespan = np.full(len(group), np.nan)
    serial = [number for number in fit if not plans[number].axes.overlap]
    if serial:
        costs = StageColumns.of_plans([plans[number] for number in serial]).batch()
        makespan[serial] = simulate_batch(order.dependencies, costs).makespan
    beside = [number for number in fit if plans[number].axes.overlap]
    if beside:
        makespan[beside] = orders.floors.of([plans[number] for number in beside], order.dependencies)
    if not fit:
        return []
    steps = StageColumns.of_plans([plans[number] for number in fit]).steps(makespan[fit, None])[:, 0]
    return [
        SimulatedPlan(*group[number], float(step), float(peaks[number]), order.digest, float(step))
        for number, step in zip(fit, steps.tolist(), strict=True)
    ]
