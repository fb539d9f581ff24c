"""Judges the orders of a policy by what happens inside of their cells."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedc.ir.schedule import Schedule
from schedc.plan.attached import AttachedPlan
from schedc.plan.in_slices import with_slices
from schedc.plan.price_cells import op_times, price_order
from schedc.step.costs.costs import Costs
from schedc.step.legality import check_dependencies
from schedc.step.op_times import OpTimes, StepTimes


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
