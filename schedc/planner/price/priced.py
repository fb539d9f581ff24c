"""Prices plans: the makespan of an order, what its ranks hold, and what stands beside both.

Searches, predictions of rows, explanations and written files have their figures from `price_plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor

import numpy as np

from schedc.inputs import open_input
from schedc.ir.arrays import Floats
from schedc.load.library import Text
from schedc.plan.candidates import ChosenBalance
from schedc.plan.passes import Step, lower
from schedc.planner.cluster.domains import occupied_devices
from schedc.planner.price.files import PlannedStep, planned_run
from schedc.planner.price.orders import KnownOrder, OrderKey, known_order
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.stage_columns import PlansOfOrder, StageColumns
from schedc.planner.price.states import OutsidePipeline
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.problem import TrainingRun
from schedc.planner.times.table import RunTable
from schedc.source import Source
from schedc.step.batch import simulate_batch
from schedc.step.cells import cell_pricing
from schedc.step.cells.cell_pricing import CellPricing
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import Timeline, simulate
from schedc.units import shown

_ANY = 1e18
"""Bytes of a memory that no plan fills."""


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """A plan, priced.

    makespan: seconds of the pipeline, as `schedc check` says it of the files: from inside cells where exchanges run
    beside compute. beside: seconds of a step beside it. peaks: [P] bytes of each rank at its peak, parameters included,
    with even rows. reserve: bytes that no file says: what no order counts, and rows beyond the mean. digest: of the
    order (`order_digest`). name, notes: of its files. ways: how it may copy experts; None without a record of the
    routing.
    """

    planned: PlannedStep
    makespan: float
    beside: OutsidePipeline
    peaks: tuple[float, ...]
    reserve: float
    digest: bytes
    name: str = "planned"
    notes: tuple[str, ...] = ()
    ways: ChosenBalance | None = None

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return float(self.beside.step_of(self.makespan))

    @property
    def occupied(self) -> int:
        """Devices of the plan, with the spare devices of its domains."""
        return occupied_devices(self.planned.problem.cluster, self.planned.axes.spare)

    @property
    def usable(self) -> float:
        """Bytes of a device."""
        return self.planned.problem.cluster.device.usable_bytes

    @property
    def needed(self) -> float:
        """Bytes of the fullest rank, with what no order counts."""
        return max(self.peaks) + self.reserve

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable * (1 + 1e-12)

    @cached_property
    def plan_text(self) -> str:
        """The text of the plan file."""
        return self.planned.plan_file(self.name, self._room if self.fits else _ANY, (*self.notes, self._needs))

    @property
    def _room(self) -> float:
        """Bytes between ops, which `memory` bounds: whole millions of them, where that leaves room for the peak."""
        exact = max(self.usable - self.reserve, 1.0)
        rounded = floor(exact / 1e6) * 1e6
        return rounded if rounded >= max(self.peaks) else exact

    @property
    def _needs(self) -> str:
        """What fills the fullest rank: `memory` bounds the part that follows from the order."""
        needed, peak, reserve = (shown(bytes, up=True) for bytes in (self.needed, max(self.peaks), self.reserve))
        axes = self.planned.axes
        apart = " Inputs that ranks gather come on top in this runtime." * (axes.tp * axes.cp > 1)
        return (
            f"The fullest rank needs {needed} of {shown(self.usable)}: {peak} between ops, and {reserve} of buffers,"
            f" largest gradients and gathered weights. `memory` bounds the first part.{apart} For the inside"
            " of cells `schedc check` has an estimate from above."
        )

    @cached_property
    def cost_text(self) -> str:
        """The text of the cost file."""
        return self.planned.cost_file()


def price_plan(planned: PlannedStep, name: str = "planned", notes: tuple[str, ...] = ()) -> PricedPlan:
    """The price of a plan. Raises `DiagnosticError` where the schedule refuses the sizes."""
    order = order_of(planned)
    columns, timeline = StageColumns.of_plans([planned]), pipeline_of(planned, order)
    makespan = pipeline_seconds(planned, timeline)
    beside = columns.beside(np.array([[makespan]]))
    of_plan = OutsidePipeline(*(np.asarray(seconds).item() for seconds in beside))
    even = replace(columns, table=planned.table.with_even_rows).rank_bytes(order)[:, 0]
    reserve = float(columns.peaks(order)[0] - even.max())
    return PricedPlan(planned, makespan, of_plan, tuple(even.tolist()), reserve, order.digest, name, notes)


def pipeline_seconds(planned: PlannedStep, timeline: Timeline) -> float:
    """Seconds of a pipeline: its busiest rank's where ranks start the next step without a wait, else the makespan."""
    return float(timeline.span.max()) if planned.problem.stack.free_steps else timeline.makespan


def order_of(planned: PlannedStep) -> KnownOrder:
    """The order of a plan. An order that follows costs comes from the plan's files."""
    if planned.choice.by_policy:
        return KnownOrder(read_back(planned).dependencies)
    return known_order(planned.choice, OrderKey.of(planned.axes))


def pipeline_of(planned: PlannedStep, order: KnownOrder, vector: int = 0) -> Timeline:
    """The timeline of a plan's pipeline under a vector of constants of its table."""
    dependencies = order.dependencies
    if not planned.axes.overlap:
        return simulate(dependencies.schedule, StageColumns.of_plans([planned]).costs(vector), dependencies)
    return inside_of(planned, dependencies, vector).late_wait


def inside_of(planned: PlannedStep, dependencies: Dependencies, vector: int = 0) -> CellPricing:
    """The order of a plan, priced from inside its cells under a vector of constants of its table.

    All cells run the programs of the one of `PlannedStep.orderings` that has the shortest step.
    """
    table, (graphs, recomputed) = planned.table, planned.graphs
    row = int(StageColumns.of_plans([planned]).rows[0, vector])
    ordered_by = planned.shortest_ordering(dependencies, row)
    costs = table.cell_costs(row, planned.choice.splits)
    return cell_pricing.price(
        dependencies, graphs, costs, float(table.p2p[row]), recomputed=recomputed, ordered_by=ordered_by
    )


def step_seconds(runs: RunTable, constants: ConstantVectors) -> Floats:
    """[runs, K] seconds of the steps of runs under constants: those of `price_plan`, but for rounding.

    Each order is made once, and simulated once for all runs that have it. An order that follows the costs is made under
    the medians.
    """
    return _seconds(runs, constants, runs.once("orders", lambda: _runs_by_order(runs)))


def plan_seconds(plans: Sequence[PlannedStep], constants: ConstantVectors, orders: Sequence[KnownOrder] = ()) -> Floats:
    """[plans, K] seconds of the steps of plans under constants, as `step_seconds` has them of runs.

    orders: of the plans, where they are known. Else an order that follows the costs is that of the plan's own table.
    """
    runs = RunTable([TrainingRun(plan.problem, plan.axes) for plan in plans])
    table = PartTable.of_runs(runs, plans[0].problem.vectors)
    own = [replace(plan, table=table, number=number, placed=plan.layout) for number, plan in enumerate(plans)]
    return _seconds(runs, constants, _same_order(own, orders or [order_of(plan) for plan in plans]))


def _seconds(runs: RunTable, constants: ConstantVectors, groups: Sequence[tuple[PlansOfOrder, KnownOrder]]) -> Floats:
    table = PartTable.of_runs(runs, constants)
    seconds = np.empty((len(runs), len(constants)))
    for plans, order in groups:
        columns = StageColumns(plans, table)
        seconds[columns.runs] = columns.steps(_pipelines(columns, order))
    return seconds


def _runs_by_order(runs: RunTable) -> list[tuple[PlansOfOrder, KnownOrder]]:
    """The runs by order, each planned under the medians of the constants."""
    table = PartTable.of_runs(runs, ConstantVectors.of((), np.zeros((1, 0))))
    plans = [planned_run(run, table, number) for number, run in enumerate(runs.each)]
    return _same_order(plans, [order_of(plan) for plan in plans])


def _same_order(plans: Sequence[PlannedStep], orders: Sequence[KnownOrder]) -> list[tuple[PlansOfOrder, KnownOrder]]:
    """The plans of one table by order; pairs by what decides their cells, too. orders: of the plans."""
    groups: defaultdict[tuple[KnownOrder, object], list[PlannedStep]] = defaultdict(list)
    for plan, order in zip(plans, orders, strict=True):
        groups[order, _cells_of(plan) if plan.axes.overlap else None].append(plan)
    return [(PlansOfOrder(group), order) for (order, _), group in groups.items()]


def _cells_of(plan: PlannedStep) -> tuple[object, ...]:
    """Equal for plans whose cells have the same nodes, whatever they take."""
    problem = plan.problem
    sizes = tuple(level.size for level in problem.cluster.levels)
    return problem.model, plan.axes, plan.layout, problem.stack, problem.cluster.per_node, sizes


def _pipelines(columns: StageColumns, order: KnownOrder) -> Floats:
    """[n, K] seconds of the pipelines of plans with an order."""
    first = columns.of.plans[0]
    if first.axes.overlap:
        seconds = first.seconds_by_ordering(order.dependencies, columns.table, columns.rows.ravel())
        return np.asarray(seconds.min(axis=0).reshape(columns.rows.shape))
    outcomes = simulate_batch(order.dependencies, columns.batch())
    whole, busiest = (each.reshape(columns.rows.shape) for each in (outcomes.makespan, outcomes.span.max(axis=0)))
    return np.where(columns.of.free, busiest, whole)


def read_back(planned: PlannedStep) -> Step:
    """The files of a plan through the compiler, with memory for any peak. Raises `DiagnosticError`."""
    return lower(opened_files(planned), "predicted", "memory")


def opened_files(planned: PlannedStep) -> Step:
    """The files of a plan, with memory for any peak, before any pass."""
    tree = open_input(Text(Source("planned.sched", planned.plan_file("planned", _ANY)), "planned"))
    return Step(tree, {}, planned.costs())
