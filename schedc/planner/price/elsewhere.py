"""Prices plans on other machines and under other constants, in the orders and layouts that they have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from schedc.ir.arrays import Floats
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.orders import KnownOrder
from schedc.planner.price.priced import order_of, step_seconds
from schedc.planner.price.stage_columns import PlansOfOrder
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.table import RunTable


@dataclass(frozen=True, eq=False)
class KeptPlans:
    """Plans whose orders and layouts are kept, whatever machine prices them. plans: of one model and batch."""

    plans: Sequence[PlannedStep]

    @cached_property
    def orders(self) -> list[KnownOrder]:
        """[plans] the order of each."""
        return [order_of(plan) for plan in self.plans]

    @cached_property
    def here(self) -> RunTable:
        """[plans] the plans as runs of their own problems."""
        return self._runs([plan.problem for plan in self.plans], self.plans)

    def under(self, constants: ConstantVectors) -> Floats:
        """[plans, K] seconds of a step of each plan under constants."""
        return step_seconds(self.here, constants)

    def on(self, problems: Sequence[PlanProblem]) -> Floats:
        """[plans, problems] seconds of a step of each plan in each problem, under the constants of the first one."""
        runs = self._runs([problem for problem in problems for _ in self.plans], list(self.plans) * len(problems))
        return step_seconds(runs, problems[0].vectors).reshape(len(problems), -1).T

    def _runs(self, problems: Sequence[PlanProblem], plans: Sequence[PlannedStep]) -> RunTable:
        """Runs of plans in problems, each in its order: runs of one order are simulated together."""
        groups: defaultdict[int, list[PlannedStep]] = defaultdict(list)
        first: dict[bytes, int] = {}
        for number, (problem, plan) in enumerate(zip(problems, plans, strict=True)):
            place = number % len(self.plans)
            alike = first.setdefault(self.orders[place].digest + bytes([plan.choice.splits]), place)
            key = -1 - number if plan.axes.overlap else alike
            groups[key].append(replace(plan, problem=problem, placed=plan.layout, number=number))
        orders = [
            (PlansOfOrder(each), self.orders[(each[0].number or 0) % len(self.plans)]) for each in groups.values()
        ]
        runs = [TrainingRun(problem, plan.axes) for problem, plan in zip(problems, plans, strict=True)]
        return RunTable(runs, {"orders": orders})
