"""Chooses what `recompute auto` recomputes: levels of layers under the memory of a plan, for the shortest step.

Which levels fit is counted exactly, rank by rank. The step is that of `simulate`. So the search asks for times only:
which mixes of stages that share a rank, and whether Rs in bubbles shorten the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from schedc.ir.arrays import Floats, reduceat
from schedc.ir.ops import OpKind
from schedc.ir.plan import Level, Plan, Recompute
from schedc.plan.apply import layer_costs, stage_costs
from schedc.plan.directives.base import Directives
from schedc.plan.fitting_levels import ROUNDING, RankGroup, fitting, groups_of, least_sum, least_times
from schedc.plan.held_memory import extra_memory, held_memory, running_memory
from schedc.plan.layout.parts import Layout, layers_in
from schedc.plan.level_mixes import Mix, StageSizes, mixes_of, preference, undominated
from schedc.plan.part_costs import forward_times
from schedc.plan.peak_memory import check_memory
from schedc.plan.place_recomputation import recompute_in_backwards, with_every_recomputation
from schedc.plan.search_levels import FittingMixes, LevelProblem, LevelSearch
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import durations, run_times
from schedc.units import amount

_Mixes = Mapping[int, Sequence[Mix]]
"""By stage, most held first."""


@dataclass(frozen=True)
class ChosenRecomputation:
    """What was chosen, and what it is compared with. Times are makespans, in the unit of the costs.

    plan: with the levels. stages: those whose levels were chosen. uncapped: nothing is recomputed in these stages.
    bound: no levels of their layers give less in this order of ops, whether inside backwards or in Rs directly before
    them. one_level: (level, makespan) of the best single level that fits; None where none does. level_per_stage:
    makespan of the best single level for each stage, likewise. limit: of the memory. held: [P] the peaks.
    tried: number of simulations. alone: makespans of levels alone and of offloads alone, where both were chosen; None
    for one that does not fit.
    """

    plan: Plan
    stages: tuple[int, ...]
    makespan: float
    uncapped: float
    bound: float
    one_level: tuple[Level, float] | None
    level_per_stage: float | None
    limit: float
    held: tuple[float, ...]
    tried: int
    seconds: float
    alone: tuple[float | None, float | None] | None = None


def choose_recomputation(
    directives: Directives,
    layout: Layout,
    costs: Costs,
    plan: Plan,
    dependencies: Dependencies,
    stages: Sequence[int],
    limit: float | None = None,
) -> ChosenRecomputation:
    """The levels of ``stages`` under a memory. costs: those of a layer. plan: without these levels.

    limit: memory, by default that of the plan.

    Raises `DiagnosticError` (S406) where no levels fit, with the least memory that would do.
    """
    began = perf_counter()
    problem = _problem(directives, layout, costs, plan, dependencies, limit)
    plain, with_r = _groups(problem, stages)
    mixes = _mixes(problem, stages)
    search = LevelSearch(problem)
    inside = _fitting(problem, plain, mixes)
    chosen = search.descend(inside)
    others = _ahead(problem, inside, chosen, with_r, mixes)
    best = search.best(chosen, others, bubbles=costs.R is None and costs.cell is None)
    single, by_stage = _single_levels(search, plain, stages)
    return ChosenRecomputation(
        problem.with_levels(best.levels),
        tuple(stages),
        best.makespan,
        search.outcome({}).makespan,
        min(_bound(problem, inside, mixes), best.makespan),
        single,
        by_stage,
        problem.limit,
        tuple(best.held.tolist()),
        search.tried,
        perf_counter() - began,
    )


def _problem(
    directives: Directives,
    layout: Layout,
    costs: Costs,
    plan: Plan,
    dependencies: Dependencies,
    limit: float | None,
) -> LevelProblem:
    memory, layers = directives.tree.memory, layer_costs(directives)
    assert memory is not None, "the lines were checked"
    extra = extra_memory(plan, layout, layers.activations, dependencies.schedule, bool(memory.unit))
    base = stage_costs(directives, layout, costs, plan)
    if any(bubbles := [level.bubbles for level in plan.recompute]):
        base = recompute_in_backwards(base, bubbles)
    limit = amount(memory.limit, memory.unit) if limit is None else limit
    return LevelProblem(directives, layout, layers, costs, plan, dependencies, base, limit, extra)


def _groups(problem: LevelProblem, stages: Sequence[int]) -> tuple[list[RankGroup], list[RankGroup]]:
    """The stages by ranks, with the rows of their memory, and the same with an R before every backward."""
    schedule, costs = problem.schedule, problem.base.resolved(problem.schedule.stages)
    activation, recomputed, restored = (x.copy() for x in (costs.activation, costs.recomputed, costs.restored))
    for column in (activation, recomputed, restored):
        column[list(stages)] = 0.0
    others = replace(costs, activation=activation, recomputed=recomputed, restored=restored)
    rest = running_memory(schedule, others, problem.extra.slots.in_flight)
    return groups_of(schedule, stages, problem.held(schedule, problem.base).standing, rest, costs.activation)


def _mixes(problem: LevelProblem, stages: Sequence[int]) -> dict[int, Sequence[Mix]]:
    """The mixes of each stage; stages with equal layers share them."""
    costs, parts = problem.base.resolved(problem.schedule.stages), problem.costs.parts
    forward = None if parts is None else forward_times(parts)
    counted: dict[tuple[object, ...], Sequence[Mix]] = {}
    mixes: dict[int, Sequence[Mix]] = {}
    for stage in stages:
        sizes = StageSizes(float(costs.activation[stage]), float(costs.F[stage]))
        key = (sizes, *(part.kind for part in problem.layout.stages[stage]))
        if key not in counted:
            counted[key] = mixes_of(problem.plan, problem.layout, problem.layers, stage, sizes, forward)
            if isinstance(problem.costs.activation, tuple):  # numbers per stage stay, whatever is recomputed
                counted[key] = [Mix(sizes.activation, 0.0, 0.0, ())]
        mixes[stage] = counted[key]
    return mixes


def _fitting(problem: LevelProblem, groups: Sequence[RankGroup], mixes: _Mixes) -> FittingMixes:
    """The choices that fit. Raises S406 with the levels that hold least where a group has none."""
    own = [[mixes[stage] for stage in group.stages] for group in groups]
    options = [fitting(group, each, problem.limit) for group, each in zip(groups, own, strict=True)]
    if not all(options):
        least = problem.with_levels({stage: each[-1].recompute for stage, each in mixes.items()})
        attached, tree = problem.dependencies, problem.directives.tree
        held = held_memory(
            problem.directives, least, problem.layout, problem.layers, problem.schedule, problem.costs_of(least)
        )
        check_memory(tree, least, held, attached, chosen=True)
        options = [each or [tuple(len(x) - 1 for x in table)] for each, table in zip(options, own, strict=True)]
    return FittingMixes(groups, own, options)


def _ahead(
    problem: LevelProblem,
    inside: FittingMixes,
    chosen: Mapping[int, Mix],
    groups: Sequence[RankGroup],
    mixes: _Mixes,
) -> list[dict[int, Mix]]:
    """Mixes that leave room for Rs: in every group that has such, and where they recompute no more than ``chosen``."""
    everywhere, free = dict(chosen), dict(chosen)
    for group in groups:
        own = [mixes[stage] for stage in group.stages]
        options = fitting(group, own, problem.limit)
        if not options:
            continue
        fits = FittingMixes([group], [own], [options])
        roomy = fits.chosen(fits.least)
        everywhere |= roomy
        if sum(mix.time for mix in roomy.values()) <= sum(chosen[stage].time for stage in roomy) * (1 + ROUNDING):
            free |= roomy
    return [everywhere, free] if free != chosen and free != everywhere else [everywhere]


def _single_levels(
    search: LevelSearch, groups: Sequence[RankGroup], stages: Sequence[int]
) -> tuple[tuple[Level, float] | None, float | None]:
    """What the best level for all of these stages gives, and the best level for each."""
    problem, best, options = search.problem, None, {stage: list[Mix]() for stage in stages}
    for level in Level:
        costs = problem.costs_of(problem.with_levels(dict.fromkeys(stages, Recompute(level))))
        of_stages = costs.resolved(problem.schedule.stages)
        for stage in stages:
            time = float(of_stages.recompute_in_backward[stage])
            options[stage].append(Mix(float(of_stages.activation[stage]), time, time, ((level, 1),)))
        if (problem.held(problem.schedule, costs).peaks() <= problem.limit * (1 + ROUNDING)).all():
            search.tried += 1
            makespan = problem.makespan(of_stages.recompute_in_backward)
            best = min(best or (level, makespan), (level, makespan), key=lambda pair: pair[1])
    fits = [[undominated(options[stage]) for stage in group.stages] for group in groups]
    fitted = [fitting(group, own, problem.limit) for group, own in zip(groups, fits, strict=True)]
    if not all(fitted):
        return best, None
    of_groups = FittingMixes(groups, fits, fitted)
    return best, search.inside(of_groups.chosen(of_groups.least))


def _bound(problem: LevelProblem, inside: FittingMixes, mixes: _Mixes) -> float:
    """A step that no levels undercut: every stage at the least time that fits, in Rs before all backwards.

    A cell behind its R begins no later than one that recomputes inside, and no cell takes longer than with more time.
    A rank is also busy with the least sum of its stages, from its first cell on.
    """
    schedule, forward = problem.schedule, problem.base.resolved(problem.schedule.stages).F
    time, known = problem.recomputed, problem.base.resolved(schedule.stages)
    slack = {
        stage: preference(StageSizes(0.0, float(forward[stage])), len(layers_in(problem.layout.stages[stage])))
        for stage in mixes
    }
    again, cost = np.array([level.bubbles for level in problem.plan.recompute]), known.R.copy()
    for group, own in zip(inside.groups, inside.mixes, strict=True):
        for stage, least in zip(group.stages, least_times(group, own, problem.limit), strict=True):
            again[stage], cost[stage] = True, max(0.0, least - slack[stage])
    dependencies = with_every_recomputation(problem.dependencies, again)
    costs = replace(problem.base, R=tuple(cost.tolist()), recompute_in_backward=tuple(time.tolist()))
    start, end = run_times(dependencies, costs)
    first = start[dependencies.rank_start[:-1]]
    return max(float(end.max(initial=0.0)), _busiest(problem, inside, slack, first))


def _busiest(problem: LevelProblem, inside: FittingMixes, slack: Mapping[int, float], first: Floats) -> float:
    """The longest time until a rank has done all of its work. first: [P] when its first cell begins at least."""
    schedule, known = problem.schedule, problem.dependencies
    busy = reduceat(np.add, durations(known, problem.base.resolved(schedule.stages)), known.rank_start[:-1])
    latest = 0.0
    for at, group in enumerate(inside.groups):
        least = least_sum(group, inside.mixes[at], problem.limit)
        if len(group.stages) <= 2:  # not all choices of more stages are known
            least = max(least, min(inside.time(at, number) for number in range(len(inside.options[at]))))
        least -= sum(slack[stage] for stage in group.stages)
        for rank in group.ranks:
            backwards = _backwards(problem, rank, group.stages)
            latest = max(latest, float(first[rank] + busy[rank]) + min(backwards) * max(0.0, least))
    return latest


def _backwards(problem: LevelProblem, rank: int, stages: Sequence[int]) -> list[int]:
    """Number of backwards of each stage on a rank."""
    low, high = problem.schedule.rank_start[rank : rank + 2]
    own = problem.schedule.stage[low:high][np.isin(problem.schedule.kind[low:high], (OpKind.B, OpKind.I))]
    return [int((own == stage).sum()) for stage in stages]
