"""Gathers plans to compare under common draws, and draws the constants and the loads that price them.

What is compared: the best plans of a search, the best of some searches under drawn constants, and plans that are asked
for by their axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.answers.chances import PlanChances
from schedc.planner.fit.estimate import needed
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.priced import plan_seconds
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.search.candidates import Candidates
from schedc.planner.search.result import FoundPlan, SearchResult
from schedc.planner.search.standing import SearchProgress
from schedc.planner.space.blocks import PlanBlock
from schedc.planner.space.conditions import REQUIRE, PlanCondition
from schedc.planner.space.space import OUTER, PlanSpace
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.problem import PlanProblem, TrainingRun
from schedc.planner.times.skew import LOADS_NAME, LOADS_WIDTH
from schedc.planner.times.table import RunTable

SEARCHES = 12
"""Searches under drawn constants."""

NEAR = 1.25
"""Searches under drawn constants look at plans whose bound is at most so many times the best step."""
_PREFIXES = 64
"""And among them at those with the outer axes of the best so many."""


@dataclass(frozen=True)
class DrawsAsked:
    """Draws of a comparison. number: of draws."""

    number: int
    seed: int = 0


@dataclass(frozen=True, eq=False)
class ComparedPlans:
    """Plans of one problem under common draws.

    plans: the printed ones come first. printed: how many are printed. constants: the draws.
    """

    plans: Sequence[PlannedStep]
    printed: int
    constants: ConstantVectors

    @cached_property
    def chances(self) -> PlanChances:
        return PlanChances(plan_seconds(self.plans, self.constants))

    @cached_property
    def logs(self) -> dict[str, Floats]:
        """[draws] logarithms by name, of what prices any of the plans: constants, and the spread of loads."""
        runs = RunTable([TrainingRun(plan.problem, plan.axes) for plan in self.plans])
        drawn = {each.name: self.constants[each.name] for each in needed(runs) if each.name in self.constants.values}
        if self.constants.loads is not None:
            drawn[LOADS_NAME] = self.constants.loads
        return {name: np.log(values[0]) for name, values in drawn.items() if np.ptp(values) > 0}


def drawn_constants(problem: PlanProblem, asked: DrawsAsked) -> ConstantVectors:
    """The draws for plans of a problem: constants as the fit knows them, and the spread of loads that is assumed."""
    constants = problem.known.draws(asked.number, asked.seed)
    if not problem.assumed:
        return constants
    rng = np.random.default_rng([asked.seed, 1])
    shares = (rng.permutation(asked.number) + rng.random(asked.number)) / asked.number
    normal = np.array([NormalDist().inv_cdf(share) for share in shares.tolist()])
    return replace(constants, loads=(problem.spread * np.exp(LOADS_WIDTH * normal))[None])


def compare_plans(
    space: PlanSpace,
    problem: PlanProblem,
    found: SearchResult,
    also: Sequence[FoundPlan],
    asked: DrawsAsked,
    progress: SearchProgress,
) -> ComparedPlans:
    """The plans of a search and those that are asked for, with the best of searches under drawn constants.

    progress: as for `search`.
    """
    constants = drawn_constants(problem, asked)
    printed = [plan.planned for plan in (*found.plans, *also)]
    table = printed[0].table
    searched = drawn_constants(
        problem, replace(asked, number=SEARCHES, seed=0)
    )  # the same plans meet, whatever the seed
    others = dict.fromkeys(_best_under(_near(space, found), problem, searched, progress))
    for plan in printed:
        others.pop(plan.axes, None)
    more = [PlannedStep(problem, axes, space.choice(axes.schedule), table) for axes in others]
    return ComparedPlans([*printed, *more], len(printed), constants)


def _best_under(
    space: PlanSpace, problem: PlanProblem, constants: ConstantVectors, progress: SearchProgress
) -> Iterator[Any]:
    """The axes of the best plan under each of the draws, by the floors of pairs."""
    options = SearchOptions(top=1, policy_seconds=0.0, inside=False, first=16)
    for number in range(len(constants)):
        progress("drawn", number)
        result = search(space, replace(problem, drawn=constants.only(number)), options)
        yield from (plan.axes for plan in result.plans)


def _near(space: PlanSpace, found: SearchResult) -> PlanSpace:
    """The part of a space around its best plans: outer axes, schedules, levels, layouts and methods of near plans."""
    values: dict[str, set[Any]] = {}
    prefixes = set()
    for block, numbers in _near_plans(found.candidates, found.plans[0].step_s):
        outer, *inner = np.unravel_index(numbers, block.legal.shape)
        prefixes |= {tuple(getattr(block.prefixes[place], name) for name in OUTER) for place in set(outer.tolist())}
        of = block.inner
        axes: dict[str, Sequence[Any]] = {"schedule": [order.choice.name for order in of.orders], "levels": of.levels}
        axes |= {"layouts": of.layouts, "methods": of.methods, "zero": of.zeros}
        for (name, own), places in zip(axes.items(), inner, strict=True):
            values.setdefault(name, set()).update(own[place] for place in set(places.tolist()))
    schedules = values.pop("schedule")
    kept = {name: tuple(each for each in getattr(space.values, name) if each in near) for name, near in values.items()}
    outer_axes = PlanCondition("near", REQUIRE, frozenset(OUTER), lambda axes: _among(axes, prefixes))
    schedule = PlanCondition(
        "near", REQUIRE, frozenset({"schedule"}), lambda axes: np.isin(axes["schedule"], sorted(schedules))
    )
    return replace(space, values=replace(space.values, **kept), conditions=(*space.conditions, outer_axes, schedule))


def _among(axes: Mapping[str, Any], prefixes: set[tuple[int, ...]]) -> Any:
    """[points] whether the outer axes of a point are among these."""
    return np.array([point in prefixes for point in zip(*(axes[name].tolist() for name in OUTER), strict=True)])


def _near_plans(candidates: Candidates, best_s: float) -> Iterator[tuple[PlanBlock, Any]]:
    """By block, the flat numbers of the near plans: those of the nearest prefixes."""
    end = int(np.searchsorted(candidates.step, NEAR * best_s, side="right"))
    fixed = np.flatnonzero(~candidates.policy[:end])
    block, number = candidates.block[fixed], candidates.number[fixed]
    inner = np.array([each.legal[0].size for each in candidates.blocks])
    prefix = np.cumsum([0, *(len(each.prefixes) for each in candidates.blocks)])[block] + number // inner[block]
    _, first = np.unique(prefix, return_index=True)
    near = np.isin(prefix, prefix[np.sort(first)[:_PREFIXES]])
    for each in np.unique(block[near]).tolist():
        yield candidates.blocks[each], number[near & (block == each)]
