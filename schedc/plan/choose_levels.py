"""Chooses the levels that a plan leaves to the compiler: alone, or together with offloads under `offload auto`.

Each candidate is the step under another plan, which the passes price. Which levels fit is counted exactly, rank by
rank. So the search asks for times only: which mixes of stages that share a rank, and whether Rs in bubbles shorten the
step.

Together, levels are chosen under a memory between the plan's own and that of a step without a cap. Activations then
leave until the plan's memory holds. The ends of this range are recomputation alone and offload alone, so that no
choice is longer than the better of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.ir.arrays import Floats, reduceat
from schedc.ir.ops import OpKind
from schedc.ir.plan import Level, Plan, Recompute
from schedc.ir.schedule import Schedule
from schedc.ir.scopes import is_chosen
from schedc.plan.apply import forward_times, level_times
from schedc.plan.counts.layers import NO_TIMES
from schedc.plan.directives.recompute import auto_stages
from schedc.plan.held_memory import running_memory
from schedc.plan.layout.parts import layers_in
from schedc.plan.level_groups import ROUNDING, LevelGroup, groups_of
from schedc.plan.level_mixes import ChosenLevels, Mix, mixes_of, preference, undominated
from schedc.plan.passes import Step, lower
from schedc.plan.peak_memory import MemoryBesideWorks, check_memory
from schedc.plan.place_recomputation import recompute_in_backwards, with_every_recomputation
from schedc.step.costs.costs import StageCosts
from schedc.step.timeline import durations, run_times
from schedc.units import amount

MOST_OPS = 700_000
"""Ops that the search may simulate, over all of its tries."""
_MOST_OPTIONS = 16
"""The most choices of a group that are tried beside the one that recomputes least."""
_SHORTER = 1 - 1e-9
"""A step is shorter below this part of another one."""
_MEMORIES = 6
"""Memories that are tried between the plan's own and that of a step without a cap, where activations may leave."""


def choose_levels(step: Step) -> tuple[Plan, ChosenLevels | None]:
    """The plan with the levels that it leaves to the compiler, and what was chosen; None where it leaves none.

    Raises `DiagnosticError` (S406) where nothing fits, with the least memory that would do.
    """
    stages, memory = auto_stages(step.lines, step.schedule), step.lines.tree.memory
    if not stages:
        return step.plan, None
    assert memory is not None, "the lines were checked"
    search = LevelSearch(step, stages, amount(memory.limit, memory.unit))
    chosen = _beside_offloads(search) if is_chosen(step.plan) else _levels_alone(search)
    return chosen.plan, chosen


def _levels_alone(search: LevelSearch) -> ChosenLevels:
    """The levels of the shortest step. Raises `DiagnosticError` (S406) where no levels fit."""
    began = perf_counter()
    plain, with_r = search.groups
    search.check_that_levels_fit(plain)
    chosen = search.descend(plain)
    best = search.best(chosen, _roomy(chosen, with_r))
    single, by_stage = _single_levels(search, plain)
    makespan = _makespan(best)
    return ChosenLevels(
        best.plan,
        search.stages,
        makespan,
        _makespan(search.outcome({})),
        min(_bound(search, plain), makespan),
        single,
        by_stage,
        search.limit,
        tuple(best.held.peaks().tolist()),
        search.tried,
        perf_counter() - began,
    )


def _beside_offloads(search: LevelSearch) -> ChosenLevels:
    """The levels of the shortest step of those tried with their offloads. Ties go to the least recomputation.

    Raises `DiagnosticError` (S406) where neither levels nor offloads fit, with the least memory that levels need.
    """
    began, tried, cap = perf_counter(), dict[float, ChosenLevels](), search.limit
    whole = _levels_alone(search.under(np.inf))
    for limit in [*np.linspace(cap, max(cap, *whole.held), _MEMORIES + 1)[:-1].tolist(), np.inf]:
        try:
            levels = whole if limit == np.inf else _levels_alone(search.under(limit))
        except DiagnosticError:  # these levels do not fit; without a limit all do
            continue
        step = lower(search.step.with_plan(levels.plan), "offloading")
        assert step.offloading is not None, "the plan has a line `offload auto`"
        peaks = MemoryBesideWorks(step.held, step.dependencies, step.offloading.placed).peaks
        if (peaks <= cap * (1 + ROUNDING)).all():
            tried[limit] = replace(levels, makespan=step.offloading.makespan, held=tuple(peaks.tolist()))
    if not tried:
        _levels_alone(search.under(cap))  # says the least memory that levels need
    shortest = min(levels.makespan for levels in tried.values()) * (1 + 1e-9)
    best = next(levels for levels in reversed(tried.values()) if levels.makespan <= shortest)
    return replace(
        best,
        bound=min(best.uncapped, best.makespan),
        limit=cap,
        one_level=None,
        level_per_stage=None,
        tried=sum(levels.tried for levels in tried.values()),
        seconds=perf_counter() - began,
        alone=(tried[cap].makespan if cap in tried else None, tried[np.inf].makespan if np.inf in tried else None),
    )


def _makespan(step: Step) -> float:
    return float(run_times(step.dependencies, step.costs)[1].max(initial=0.0))


@dataclass
class LevelSearch:
    """The search. step: with nothing recomputed in ``stages``, whose levels are chosen. limit: of the memory.

    tried: number of simulations so far.
    """

    step: Step
    stages: tuple[int, ...]
    limit: float
    tried: int = field(default=0)

    def under(self, limit: float) -> LevelSearch:
        """The search under another limit."""
        return LevelSearch(self.step, self.stages, limit)

    @property
    def schedule(self) -> Schedule:
        return self.step.schedule

    def candidate(self, levels: Mapping[int, Recompute]) -> Step:
        """The step with the levels of some stages."""
        plan = self.step.plan
        of_stages = [levels.get(stage, plan.recompute_of(stage)) for stage in range(self.schedule.stages)]
        return self.step.with_plan(replace(plan, recompute=tuple(of_stages)))

    def inside_backwards(self, levels: Mapping[int, Recompute]) -> Step:
        """The `candidate` with the costs of its stages and its memory, before any R is placed."""
        step = self.candidate(levels)
        return lower(replace(step, done=step.done | {"recompute"}), "held")

    @cached_property
    def plain(self) -> Step:
        """The step that recomputes nothing in the stages to be chosen, and inside backwards in the others."""
        step, bubbles = self.inside_backwards({}), [level.bubbles for level in self.step.plan.recompute]
        return step.under(recompute_in_backwards(step.costs, bubbles)) if any(bubbles) else step

    @cached_property
    def of_stages(self) -> StageCosts:
        """The costs of `plain`."""
        return self.plain.costs.resolved(self.schedule.stages)

    @cached_property
    def groups(self) -> tuple[list[LevelGroup], list[LevelGroup]]:
        """The stages by ranks, with the rows of their memory, and the same with an R before every backward."""
        costs, held = self.of_stages, self.plain.held
        activation, recomputed, restored = (x.copy() for x in (costs.activation, costs.recomputed, costs.restored))
        for column in (activation, recomputed, restored):
            column[list(self.stages)] = 0.0
        others = replace(costs, activation=activation, recomputed=recomputed, restored=restored)
        rest = running_memory(self.schedule, others, held.slots.in_flight)
        return groups_of(self.schedule, self._mixes, self.limit, held.standing, rest, costs.activation)

    @property
    def _mixes(self) -> dict[int, Sequence[Mix]]:
        """The mixes of each stage; stages with equal layers share them."""
        step, costs = self.step, self.of_stages
        counted: dict[tuple[object, ...], Sequence[Mix]] = {}
        mixes: dict[int, Sequence[Mix]] = {}
        for stage in self.stages:
            parts, activation = step.layout.stages[stage], float(costs.activation[stage])
            parts_of = step.given.parts
            time = float(costs.F[stage]) if parts_of is None else forward_times(parts_of)
            known = NO_TIMES if parts_of is None else level_times(parts_of)
            key = (activation, float(costs.F[stage]), *(part.kind for part in parts))
            if key not in counted and isinstance(step.given.activation, tuple):
                counted[key] = [Mix(activation, 0.0, 0.0, ())]  # numbers per stage stay, whatever is recomputed
            elif key not in counted:
                counted[key] = mixes_of(step.plan, parts, step.layers, activation, time, known)
            mixes[stage] = counted[key]
        return mixes

    def fits(self, step: Step) -> bool:
        """Whether every rank keeps within the limit."""
        return bool((step.held.peaks() <= self.limit * (1 + ROUNDING)).all())

    def check_that_levels_fit(self, groups: Sequence[LevelGroup]) -> None:
        """Raises `DiagnosticError` (S406) with the levels that hold least where a group has no others."""
        if all(group.fitting for group in groups):
            return
        mixes = {stage: own[-1] for group in groups for stage, own in zip(group.stages, group.mixes, strict=True)}
        least = self.inside_backwards({stage: mix.recompute for stage, mix in mixes.items()})
        check_memory(least.lines.tree, least.held, least.dependencies, chosen=True)

    def makespan(self, time: Floats) -> float:
        """The step with so much recomputation inside the backwards of each stage; time: [stages]."""
        self.tried += 1
        return _makespan(self.plain.under(replace(self.plain.costs, recompute_in_backward=tuple(time.tolist()))))

    def inside(self, chosen: Mapping[int, Mix]) -> float:
        """The step with these mixes, recomputed inside backwards."""
        time = self.of_stages.recompute_in_backward.copy()
        for stage, mix in chosen.items():
            time[stage] = mix.time
        return self.makespan(time)

    def descend(self, groups: Sequence[LevelGroup]) -> dict[int, Mix]:
        """The best mixes that a descent over groups finds, from those that recompute least."""
        numbers, most = [group.quickest for group in groups], max(8, MOST_OPS // max(1, len(self.schedule)))
        best = self.inside(_chosen(groups, numbers))
        improved = True
        while improved:
            improved = False
            for at, group in enumerate(groups):
                for number in _spread(len(group.options), numbers[at]):
                    if self.tried >= most:
                        return _chosen(groups, numbers)
                    trial = [*numbers[:at], number, *numbers[at + 1 :]]
                    if (makespan := self.inside(_chosen(groups, trial))) < best * _SHORTER:
                        numbers, best, improved = trial, makespan, True
        return _chosen(groups, numbers)

    def outcome(self, levels: Mapping[int, Recompute]) -> Step:
        """The step with levels, and with Rs in bubbles where they say so and the rank's memory allows it."""
        levels = dict(levels)
        while True:
            self.tried += 1
            step = lower(self.candidate(levels), "held")
            over = np.flatnonzero(step.held.peaks() > self.limit * (1 + ROUNDING))
            beyond = {stage for rank in over for stage in self.schedule.placement.stage_of_chunk[rank].tolist()}
            placed = {stage for stage in beyond & levels.keys() if levels[stage].bubbles}
            if not placed:
                return step
            levels |= {stage: replace(levels[stage], bubbles=False) for stage in placed}

    def best(self, inside: Mapping[int, Mix], others: Sequence[Mapping[int, Mix]]) -> Step:
        """The shortest step of mixes inside backwards, and of these and others with Rs in bubbles."""
        best = self.outcome({stage: mix.recompute for stage, mix in inside.items()})
        given = self.step.given
        for chosen in (inside, *others) if given.R is None and given.cell is None else ():
            step = self.outcome({stage: _in_bubbles(mix) for stage, mix in chosen.items()})
            if self.fits(step) and _makespan(step) < _makespan(best) * _SHORTER:
                best = step
        return best


def _chosen(groups: Sequence[LevelGroup], numbers: Sequence[int]) -> dict[int, Mix]:
    """The mix of each stage. numbers: of an option by group."""
    chosen: dict[int, Mix] = {}
    for group, number in zip(groups, numbers, strict=True):
        chosen |= group.chosen(group.options[number])
    return chosen


def _in_bubbles(mix: Mix) -> Recompute:
    recompute = mix.recompute
    return replace(recompute, bubbles=recompute.level is not Level.NONE and mix.time > 0)


def _spread(count: int, around: int) -> list[int]:
    """Up to `_MOST_OPTIONS` numbers below ``count`` but ``around``, evenly apart, nearest first."""
    numbers = np.unique(np.linspace(0, count - 1, min(count, _MOST_OPTIONS)).round().astype(int))
    return sorted((int(number) for number in numbers if number != around), key=lambda number: abs(number - around))


def _roomy(chosen: Mapping[int, Mix], groups: Sequence[LevelGroup]) -> list[dict[int, Mix]]:
    """Mixes that leave room for Rs: in every group that has such, and where they recompute no more than ``chosen``."""
    everywhere, free = dict(chosen), dict(chosen)
    for group in groups:
        if not group.fitting:
            continue
        roomy = group.chosen(group.options[group.quickest])
        everywhere |= roomy
        if sum(mix.time for mix in roomy.values()) <= sum(chosen[stage].time for stage in roomy) * (1 + ROUNDING):
            free |= roomy
    return [everywhere, free] if free != chosen and free != everywhere else [everywhere]


def _single_levels(
    search: LevelSearch, groups: Sequence[LevelGroup]
) -> tuple[tuple[Level, float] | None, float | None]:
    """What the best level for all of these stages gives, and the best level for each."""
    best: tuple[Level, float] | None = None
    options = {stage: list[Mix]() for stage in search.stages}
    for level in Level:
        step = search.inside_backwards(dict.fromkeys(search.stages, Recompute(level)))
        costs = step.held.of_stage
        for stage, own in options.items():
            time = float(costs.recompute_in_backward[stage])
            own.append(Mix(float(costs.activation[stage]), time, time, ((level, 1),)))
        if search.fits(step):
            makespan = search.makespan(costs.recompute_in_backward)
            best = min(best or (level, makespan), (level, makespan), key=lambda pair: pair[1])
    single = [replace(own, mixes=tuple(undominated(options[stage]) for stage in own.stages)) for own in groups]
    if not all(group.fitting for group in single):
        return best, None
    return best, search.inside(_chosen(single, [group.quickest for group in single]))


def _bound(search: LevelSearch, groups: Sequence[LevelGroup]) -> float:
    """A step that no levels undercut: every stage at the least time that fits, in Rs before all backwards.

    A cell behind its R begins no later than one that recomputes inside, and no cell takes longer than with more time.
    A rank is also busy with the least sum of its stages, from its first cell on.
    """
    step, costs = search.plain, search.of_stages
    slack = {
        stage: preference(float(costs.F[stage]), len(layers_in(step.layout.stages[stage]))) for stage in search.stages
    }
    again, least = np.array([level.bubbles for level in step.plan.recompute]), costs.R.copy()
    for group in groups:
        for stage, time in zip(group.stages, group.least_times, strict=True):
            again[stage], least[stage] = True, max(0.0, time - slack[stage])
    dependencies = with_every_recomputation(step.dependencies, again)
    start, end = run_times(dependencies, replace(step.costs, R=tuple(least.tolist())))
    first = start[dependencies.rank_start[:-1]]
    return max(float(end.max(initial=0.0)), _busiest(search, groups, slack, first))


def _busiest(search: LevelSearch, groups: Sequence[LevelGroup], slack: Mapping[int, float], first: Floats) -> float:
    """The longest time until a rank has done all of its work. first: [P] when its first cell begins at least."""
    known = search.step.dependencies
    busy = reduceat(np.add, durations(known, search.of_stages), known.rank_start[:-1])
    latest = 0.0
    for group in groups:
        least = max(0.0, group.least_sum - sum(slack[stage] for stage in group.stages))
        for rank in group.ranks:
            backwards = min(_backwards(search.schedule, rank, group.stages))
            latest = max(latest, float(first[rank] + busy[rank]) + backwards * least)
    return latest


def _backwards(schedule: Schedule, rank: int, stages: Sequence[int]) -> list[int]:
    """Number of backwards of each stage on a rank."""
    low, high = schedule.rank_start[rank : rank + 2]
    own = schedule.stage[low:high][np.isin(schedule.kind[low:high], (OpKind.B, OpKind.I))]
    return [int((own == stage).sum()) for stage in stages]
