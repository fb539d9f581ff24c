"""Simulates plans in batches: plans of one order share a walk, and differ in the times of stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.orders import KnownOrder, OrderKey, known_order
from schedc.planner.price.priced import pipeline_of, pipeline_seconds
from schedc.planner.price.stage_columns import StageColumns
from schedc.planner.search.cell_floors import CellFloors
from schedc.planner.search.result import FoundPlan
from schedc.planner.space.schedules import ScheduleChoice
from schedc.step.batch import simulate_batch


@dataclass(frozen=True, eq=False)
class Orders:
    """Orders of a search, and floors inside cells, each made once. choice: the schedule of a name.

    refused: by the name of a schedule, why the compiler refuses its order at some sizes.
    """

    choice: Callable[[str], ScheduleChoice]
    made: dict[OrderKey, KnownOrder] = field(default_factory=dict)
    floors: CellFloors = field(default_factory=CellFloors)
    refused: dict[str, str] = field(default_factory=dict)

    def of(self, key: OrderKey) -> KnownOrder:
        """The order of a key. Raises `DiagnosticError` where the compiler finds it illegal."""
        if key not in self.made:
            self.made[key] = known_order(self.choice(key.schedule), key)
        return self.made[key]


def simulate_plans(plans: Sequence[tuple[PlannedStep, float]], orders: Orders, usable: float) -> list[FoundPlan]:
    """The plans of fixed orders that fit; given with the seconds that bound them.

    Plans of an order that the compiler refuses are left out, and ``orders.refused`` says why. usable: bytes of a
    device. Steps are exact unless exchanges run beside compute; then no order inside cells is below them.
    """
    groups: defaultdict[OrderKey, list[tuple[PlannedStep, float]]] = defaultdict(list)
    for planned, bound in plans:
        groups[OrderKey.of(planned.axes)].append((planned, bound))
    simulated: list[FoundPlan] = []
    for key, group in groups.items():
        try:
            simulated += _of_one_order(orders.of(key), group, orders.floors, usable)
        except DiagnosticError as error:
            orders.refused[key.schedule] = error.diagnostics[0].message
    return simulated


def _of_one_order(
    order: KnownOrder, group: list[tuple[PlannedStep, float]], floors: CellFloors, usable: float
) -> list[FoundPlan]:
    peaks = StageColumns.of_plans([planned for planned, _ in group]).peaks(order).tolist()
    fit = [(planned, bound, peak) for (planned, bound), peak in zip(group, peaks, strict=True) if peak <= usable]
    if not fit:
        return []
    plans = [planned for planned, *_ in fit]
    overlap = np.array([planned.axes.overlap for planned in plans])
    makespan, free = np.empty(len(fit)), plans[0].problem.stack.free_steps
    if not overlap.all():
        costs = StageColumns.of_plans([planned for planned in plans if not planned.axes.overlap]).batch()
        outcomes = simulate_batch(order.dependencies, costs)
        makespan[~overlap] = outcomes.span.max(axis=0) if free else outcomes.makespan
    if overlap.any() and free:
        makespan[overlap] = [pipeline_seconds(plan, pipeline_of(plan, order)) for plan in plans if plan.axes.overlap]
    elif overlap.any():
        makespan[overlap] = floors.of([planned for planned in plans if planned.axes.overlap], order.dependencies)
    steps = StageColumns.of_plans(plans).steps(makespan[:, None])[:, 0].tolist()
    return [
        FoundPlan(planned, step, peak, order.digest, step if planned.axes.overlap else bound, not planned.axes.overlap)
        for (planned, bound, peak), step in zip(fit, steps, strict=True)
    ]
