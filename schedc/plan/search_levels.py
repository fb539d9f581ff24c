"""Searches the mixes of levels that give the shortest step: of all that fit, by the makespan of `simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.plan import Level, Plan, Recompute
from schedc.ir.schedule import Schedule
from schedc.plan.apply import stage_costs
from schedc.plan.attached import AttachedPlan
from schedc.plan.directives.base import Directives
from schedc.plan.fitting_levels import ROUNDING, RankGroup
from schedc.plan.held_memory import ExtraMemory, HeldMemory
from schedc.plan.layout.costs import LayerCosts
from schedc.plan.layout.parts import Layout
from schedc.plan.level_mixes import Mix
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import run_times

MOST_OPS = 700_000
"""Ops that the search may simulate, over all of its tries."""
_MOST_OPTIONS = 16
"""The most choices of a group that are tried beside the one that recomputes least."""
_SHORTER = 1 - 1e-9
"""A step is shorter below this part of another one."""


@dataclass(frozen=True, eq=False)
class LevelProblem:
    """What the search needs to know.

    costs: those of a layer. plan: with nothing recomputed in the stages to be chosen. base: costs of the stages of
    that plan. limit: of the memory. extra: memory besides parameters and activations.
    """

    directives: Directives
    layout: Layout
    layers: LayerCosts
    costs: Costs
    plan: Plan
    dependencies: Dependencies
    base: Costs
    limit: float
    extra: ExtraMemory

    @property
    def schedule(self) -> Schedule:
        return self.dependencies.schedule

    @property
    def recomputed(self) -> Floats:
        """[stages] time that backwards recompute for in the stages whose levels are not to be chosen."""
        return self.base.resolved(self.schedule.stages).recompute_in_backward.copy()

    def makespan(self, time: Floats) -> float:
        """The step with so much recomputation inside the backwards of each stage; time: [stages]."""
        costs = replace(self.base, recompute_in_backward=tuple(time.tolist()))
        return float(run_times(self.dependencies, costs)[1].max(initial=0.0))

    def with_levels(self, chosen: Mapping[int, Recompute]) -> Plan:
        """The plan with the levels of some stages."""
        levels = [chosen.get(stage, self.plan.recompute_of(stage)) for stage in range(self.schedule.stages)]
        return replace(self.plan, recompute=tuple(levels))

    def costs_of(self, plan: Plan) -> Costs:
        """The costs of the stages under a plan."""
        return stage_costs(self.directives, self.layout, self.costs, plan)

    def held(self, schedule: Schedule, costs: Costs) -> HeldMemory:
        """What ranks hold in an order with these costs of the stages."""
        return HeldMemory(self.layout, self.layers, schedule, costs, self.extra)


@dataclass(frozen=True, eq=False)
class FittingMixes:
    """What every group may choose. mixes: by group and stage. options: by group, choices that fit, never none."""

    groups: Sequence[RankGroup]
    mixes: Sequence[Sequence[Sequence[Mix]]]
    options: Sequence[Sequence[tuple[int, ...]]]

    def chosen(self, numbers: Sequence[int]) -> dict[int, Mix]:
        """The mix of each stage; numbers: of an option by group."""
        return {
            stage: own[index]
            for at, number in enumerate(numbers)
            for stage, own, index in zip(self.groups[at].stages, self.mixes[at], self.options[at][number], strict=True)
        }

    def time(self, group: int, number: int) -> float:
        """Preferred time of an option, in the unit of the costs, summed over the stages of its group."""
        return sum(
            own[index].preferred for own, index in zip(self.mixes[group], self.options[group][number], strict=True)
        )

    @property
    def least(self) -> list[int]:
        """By group, the option whose stages recompute least in sum."""
        times = [[self.time(at, number) for number in range(len(own))] for at, own in enumerate(self.options)]
        return [own.index(min(own)) for own in times]


class PricedLevels(NamedTuple):
    """Levels of stages, the step with them, and what each rank holds, [P]."""

    levels: dict[int, Recompute]
    makespan: float
    held: Floats


@dataclass
class LevelSearch:
    """The search. tried: number of simulations so far."""

    problem: LevelProblem
    tried: int = field(default=0)

    @property
    def most(self) -> int:
        """The most simulations of choices inside backwards."""
        return max(8, MOST_OPS // max(1, len(self.problem.schedule)))

    def inside(self, chosen: Mapping[int, Mix]) -> float:
        """The step with these mixes, recomputed inside backwards."""
        self.tried += 1
        time = self.problem.recomputed
        for stage, mix in chosen.items():
            time[stage] = mix.time
        return self.problem.makespan(time)

    def descend(self, fitting: FittingMixes) -> dict[int, Mix]:
        """The best mixes that a descent over groups finds, from those that recompute least."""
        numbers = fitting.least
        best = self.inside(fitting.chosen(numbers))
        improved = True
        while improved:
            improved = False
            for group, options in enumerate(fitting.options):
                for number in _spread(len(options), numbers[group]):
                    if self.tried >= self.most:
                        return fitting.chosen(numbers)
                    trial = [*numbers[:group], number, *numbers[group + 1 :]]
                    if (makespan := self.inside(fitting.chosen(trial))) < best * _SHORTER:
                        numbers, best, improved = trial, makespan, True
        return fitting.chosen(numbers)

    def outcome(self, levels: Mapping[int, Recompute]) -> PricedLevels:
        """The step with levels, and with Rs in bubbles where they say so and the rank's memory allows it."""
        problem, levels = self.problem, dict(levels)
        while True:
            self.tried += 1
            plan = problem.with_levels(levels)
            attached = AttachedPlan("", "", plan, problem.layout, problem.costs_of(plan))
            dependencies, costs, _ = attached.placed(problem.dependencies)
            held = problem.held(dependencies.schedule, costs).peaks()
            over = np.flatnonzero(held > problem.limit * (1 + ROUNDING))
            beyond = {stage for rank in over for stage in problem.schedule.placement.stage_of_chunk[rank].tolist()}
            placed = {stage for stage in beyond & levels.keys() if levels[stage].bubbles}
            if not placed:
                makespan = float(run_times(dependencies, costs)[1].max(initial=0.0))
                return PricedLevels(levels, makespan, held)
            levels |= {stage: replace(levels[stage], bubbles=False) for stage in placed}

    def best(self, inside: Mapping[int, Mix], others: Sequence[Mapping[int, Mix]], bubbles: bool) -> PricedLevels:
        """The shortest step of mixes inside backwards, and of these and others with Rs in bubbles."""
        best = self.outcome({stage: mix.recompute for stage, mix in inside.items()})
        for chosen in (inside, *others) if bubbles else ():
            levels = {stage: _in_bubbles(mix) for stage, mix in chosen.items()}
            tried = self.outcome(levels)
            fits = (tried.held <= self.problem.limit * (1 + ROUNDING)).all()
            if fits and tried.makespan < best.makespan * _SHORTER:
                best = tried
        return best


def _in_bubbles(mix: Mix) -> Recompute:
    recompute = mix.recompute
    return replace(recompute, bubbles=recompute.level is not Level.NONE and mix.time > 0)


def _spread(count: int, around: int) -> list[int]:
    """Up to `_MOST_OPTIONS` numbers below ``count`` but ``around``, evenly apart, nearest first."""
    numbers = np.unique(np.linspace(0, count - 1, min(count, _MOST_OPTIONS)).round().astype(int))
    return sorted((int(number) for number in numbers if number != around), key=lambda number: abs(number - around))
