"""What a resolved plan does to an order of its schedule: layers, costs of stages, Rs in bubbles, prices from inside."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedc.ir.plan import Plan
from schedc.ir.recomputed import has_recomputation
from schedc.ir.schedule import Schedule
from schedc.plan.counts.head import in_cells
from schedc.plan.directives.notes import ties_of_plan
from schedc.plan.in_slices import with_slices
from schedc.plan.layout.parser import write_layout
from schedc.plan.layout.parts import Layout
from schedc.plan.place_recomputation import place_recomputations, recompute_in_backwards
from schedc.plan.price_cells import op_times, price_order, with_layout, with_recomputation
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_dependencies
from schedc.step.op_times import OpTimes, StepTimes
from schedc.syntax.input import AppliedPlan


@dataclass(frozen=True)
class AttachedPlan:
    """A plan whose choices are made, for every order that its schedule may have.

    name, doc: those of the plan.
    costs: those of the stages, in the unit of the layers' times. Their table of cells is that of the cost file.
    """

    name: str
    doc: str
    plan: Plan
    layout: Layout
    costs: Costs

    def on(self, schedule: Schedule) -> tuple[Schedule, Costs]:
        """The schedule with the plan, and the costs of its stages.

        The table of cells has the blocks of the layout, and the head's products in the ops of the plan's loss. The time
        of an R follows from it where the costs say none.
        """
        schedule = replace(
            schedule, name=self.name, doc=self.doc, layout=write_layout(self.layout), layers=self.layout.layers,
            plan=self.plan, tied=ties_of_plan(self.plan, self.layout),
        )  # fmt: skip
        if self.costs.cell is None:
            return schedule, self.costs
        table = with_layout(self.costs.cell, self.layout)
        if self.plan.loss is not None:
            table = in_cells(table, self.plan.loss.form, schedule)
        costs = replace(self.costs, cell=table)
        recomputes = any(self._bubbles) or has_recomputation(schedule)
        return schedule, with_recomputation(costs, schedule) if recomputes and costs.R is None else costs

    def placed(self, written: Dependencies) -> tuple[Dependencies, Costs, Dependencies | None]:
        """The order with the plan and with the Rs that it places in bubbles, and the costs of its stages.

        The last value is the order with the plan and without these Rs; None where the plan places none.
        """
        schedule, costs = self.on(written.schedule)
        dependencies = replace(written, schedule=schedule)
        if not any(self._bubbles):
            return dependencies, costs, None
        costs = recompute_in_backwards(costs, self._bubbles)
        return place_recomputations(dependencies, costs, self._bubbles), costs, dependencies

    @property
    def _bubbles(self) -> list[bool]:
        return [level.bubbles for level in self.plan.recompute]


def place(
    tree: AppliedPlan | None, plan: Plan, layout: Layout, costs: Costs, dependencies: Dependencies
) -> tuple[Dependencies, Costs, Dependencies | None]:
    """`AttachedPlan.placed` of the plan that was opened."""
    name, doc = ("", "") if tree is None else (tree.name, tree.doc)
    return AttachedPlan(name, doc, plan, layout, costs).placed(dependencies)


@dataclass(frozen=True)
class CellPricer:
    """The `schedc.step.op_times.Pricer` of costs with a table of cells.

    attached: the plan whose schedule is ordered, if it is a plan; ``costs`` are then those of its stages.
    slices: number of slices of a microbatch, where no plan says it.
    """

    costs: Costs
    attached: AttachedPlan | None = None
    slices: int = 1

    def times(self, schedule: Schedule) -> OpTimes:
        if self.attached is None:
            return op_times(self._in_slices(schedule), self.costs)
        return op_times(*self.attached.on(schedule))

    def step(self, schedule: Schedule) -> StepTimes | None:
        """The step as `schedc check` prices it from inside, with what the plan adds."""
        dependencies, findings = check_dependencies(schedule)
        if dependencies is None or findings:
            return None
        costs = self.costs
        if self.attached is not None:
            dependencies, costs, _ = self.attached.placed(dependencies)
        elif self.slices > 1:
            dependencies = replace(dependencies, schedule=self._in_slices(dependencies.schedule))
        timeline = price_order(dependencies, costs)
        return StepTimes(timeline.makespan, float(timeline.span.max(initial=0.0)))

    def _in_slices(self, schedule: Schedule) -> Schedule:
        return with_slices(schedule, self.slices) if self.slices > 1 else schedule
