"""Fits levels under the memory of ranks: the mixes of stages that share ranks, chosen together.

What a rank holds after an op is linear in what a microbatch holds on each of its stages: microbatches in flight times
held, and the rest. So a choice fits where it does at every row (in flight, rest) of each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.plan.level_mixes import Mix

ROUNDING = 1e-12
"""Share of the limit by which sums of memory may differ."""

Choice = tuple[int, ...]
"""[stages of a group] index of the mix of each stage."""


@dataclass(frozen=True, eq=False)
class LevelGroup:
    """Stages whose levels are chosen together, because they share ranks, and what the memory of these ranks allows.

    in_flight: [rows, stages] microbatches that are held. rest: [rows] other memory of the rank then. mixes: by stage,
    most held first. limit: of the memory.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    in_flight: Floats
    rest: Floats
    mixes: tuple[Sequence[Mix], ...]
    limit: float

    @cached_property
    def fitting(self) -> list[Choice]:
        """The choices that fit; empty where none does.

        One or two stages have all choices that no other choice beats in time. More stages have one choice, which no
        exchange between two stages improves.
        """
        if (self.in_flight @ self._least + self.rest > self._most).any():
            return []
        if len(self.stages) == 1:
            return [(self._first_fitting(0, self.rest),)]
        return self._pairs(0, 1, self.rest) if len(self.stages) == 2 else [self._exchanged()]

    @property
    def options(self) -> list[Choice]:
        """The choices that fit. Where rounding alone leaves none, the choice that holds least."""
        return self.fitting or [tuple(len(own) - 1 for own in self.mixes)]

    def time(self, choice: Choice) -> float:
        """Preferred time of a choice, in the unit of the costs, summed over the stages."""
        return sum(own[number].preferred for own, number in zip(self.mixes, choice, strict=True))

    def chosen(self, choice: Choice) -> dict[int, Mix]:
        """The mix of each stage."""
        return {stage: own[index] for stage, own, index in zip(self.stages, self.mixes, choice, strict=True)}

    @property
    def quickest(self) -> int:
        """The option whose stages recompute least in sum."""
        return min(range(len(self.options)), key=lambda number: self.time(self.options[number]))

    @cached_property
    def _held(self) -> list[Floats]:
        return [np.array([mix.held for mix in own]) for own in self.mixes]

    @cached_property
    def _least(self) -> Floats:
        return np.array([each.min() for each in self._held])

    @property
    def _most(self) -> float:
        return self.limit * (1 + ROUNDING)

    def _first_fitting(self, stage: int, rest: Floats) -> int:
        """The first mix of a stage, most held first, that fits at every row. rest: [rows] memory beside it."""
        in_flight = self.in_flight[:, stage]
        room = np.min(np.where(in_flight > 0, (self._most - rest) / np.where(in_flight > 0, in_flight, 1.0), np.inf))
        return int(np.argmax(self._held[stage] <= room * (1 + ROUNDING)))

    def _pairs(self, one: int, two: int, rest: Floats) -> list[Choice]:
        """For each mix of one stage the first of another that fits, without pairs that another pair beats."""
        in_flight = self.in_flight[:, [one, two]]
        left = self._most - rest - self._held[one][:, np.newaxis] * in_flight[:, 0]
        used = in_flight[:, 1] > 0
        room = np.min(left[:, used] / in_flight[used, 1], axis=1, initial=np.inf) * (1 + ROUNDING)
        room[(left[:, ~used] < 0).any(axis=1)] = -np.inf
        second = np.searchsorted(-self._held[two], -room)
        first = np.flatnonzero(second < self._held[two].size)
        preferred = np.array([mix.preferred for mix in self.mixes[two]])[second[first]]
        least = np.minimum.accumulate(np.concatenate([[np.inf], preferred[:-1]]))
        return [(int(number), int(second[number])) for number in first[preferred < least]]

    def _exchanged(self) -> Choice:
        """From the least held on, the best two mixes of each pair of stages, until no pair improves."""
        choice: Int64 = np.array([int(each.argmin()) for each in self._held])
        improved = True
        while improved:
            improved = False
            for one, two in combinations(range(len(self.stages)), 2):
                others = [number for number in range(len(self.stages)) if number not in (one, two)]
                held = np.array([self._held[n][choice[n]] for n in others])

                def time(pair: Sequence[int], one: int = one, two: int = two) -> float:
                    return self.mixes[one][pair[0]].preferred + self.mixes[two][pair[1]].preferred

                best = min(self._pairs(one, two, self.rest + self.in_flight[:, others] @ held), key=time)
                if time(best) < time((choice[one], choice[two])) * (1 - ROUNDING):
                    choice[[one, two]] = best
                    improved = True
        return tuple(choice.tolist())

    @property
    def least_times(self) -> list[float]:
        """[stages] the least preferred time of a stage, with the others of its ranks at the least they can hold."""
        times = []
        for number, own in enumerate(self.mixes):
            beside = self.rest + self.in_flight @ self._least - self.in_flight[:, number] * self._least[number]
            times.append(own[self._first_fitting(number, beside)].preferred)
        return times

    @property
    def least_sum(self) -> float:
        """A preferred time that no choice that fits undercuts, summed over the stages.

        Each row alone is a knapsack over the stages. Layers may be split in it: the cheapest memory goes first. All
        choices are known of two stages at most, so that the quickest counts there too.
        """
        hulls, most = [_hull(own) for own in self.mixes], np.array([own[0].held for own in self.mixes])
        least = 0.0
        for in_flight, rest in zip(self.in_flight, self.rest, strict=True):
            excess = float(in_flight @ most + rest - self._most)
            own = zip(in_flight.tolist(), hulls, strict=True)
            steps = [(time / (held * n), held * n) for n, hull in own if n > 0 for held, time in hull]
            spent = 0.0
            for price, freed in sorted(steps):
                if excess <= 0:
                    break
                spent, excess = spent + price * min(freed, excess), excess - freed
            least = max(least, spent)
        return max(least, self.time(self.options[self.quickest])) if len(self.stages) <= 2 else least


def _hull(mixes: Sequence[Mix]) -> list[tuple[float, float]]:
    """(memory, time) of the steps along the lower convex hull of mixes, most held first."""
    corners: list[Mix] = []
    for mix in mixes:
        while len(corners) > 1 and _price(corners[-2], corners[-1]) >= _price(corners[-1], mix):
            corners.pop()
        corners.append(mix)
    return [(one.held - two.held, two.preferred - one.preferred) for one, two in pairwise(corners)]


def _price(one: Mix, two: Mix) -> float:
    """Time per memory that the second mix frees."""
    return (two.preferred - one.preferred) / (one.held - two.held)


def groups_of(
    schedule: Schedule,
    mixes: Mapping[int, Sequence[Mix]],
    limit: float,
    constant: Floats,
    rest: Floats,
    whole: Floats,
) -> tuple[list[LevelGroup], list[LevelGroup]]:
    """The stages in groups that share no rank, and the same with an R before every backward.

    mixes: by stage. constant: [P] memory of each rank whatever runs. rest: [ops] memory after each op besides
    activations of these stages. whole: [stages of the schedule] activations of a microbatch behind its R.
    """
    plain, with_r = list[LevelGroup](), list[LevelGroup]()
    for own in _members(schedule, set(mixes)):
        ranks = [rank for rank in range(schedule.ranks) if set(schedule.placement.stage_of_chunk[rank].tolist()) & own]
        stages = tuple(sorted(own))
        rows = [_rows(schedule, rank, stages, rest, whole) for rank in ranks]
        for groups, number in ((plain, 0), (with_r, 1)):
            in_flight = np.concatenate([row[number][0] for row in rows])
            beside = np.concatenate([row[number][1] + constant[rank] for row, rank in zip(rows, ranks, strict=True)])
            of_stages = tuple(mixes[stage] for stage in stages)
            groups.append(LevelGroup(stages, tuple(ranks), *_highest(in_flight, beside), of_stages, limit))
    return plain, with_r


def _members(schedule: Schedule, stages: set[int]) -> list[set[int]]:
    """The stages in groups: two that a rank holds together are in one."""
    groups: list[set[int]] = []
    for held in schedule.placement.stage_of_chunk.tolist():
        if own := set(held) & stages:
            touching = [group for group in groups if group & own]
            groups = [group for group in groups if not group & own] + [own.union(*touching)]
    return sorted(groups, key=min)


_Rows = tuple[Floats, Floats]


def _rows(schedule: Schedule, rank: int, stages: Sequence[int], rest: Floats, whole: Floats) -> tuple[_Rows, _Rows]:
    """The rows of a rank after each op, and those with an R before every backward as well."""
    low, high = schedule.rank_start[rank : rank + 2]
    kind, stage = schedule.kind[low:high], schedule.stage[low:high]
    change = (kind == OpKind.F).astype(np.float64) - np.isin(kind, (OpKind.B, OpKind.I))
    in_flight = np.stack([np.cumsum(np.where(stage == each, change, 0.0)) for each in stages], axis=1)
    nothing = np.zeros((1, len(stages))), np.zeros(1)
    plain = np.concatenate([nothing[0], in_flight]), np.concatenate([nothing[1], rest[low:high]])
    backwards = np.flatnonzero(BACKWARD[kind] & np.isin(stage, stages))
    own = np.searchsorted(stages, stage[backwards])
    before = in_flight[backwards - 1] - np.eye(len(stages))[own]
    beside = rest[low:high][backwards - 1] + whole[stage[backwards]]
    return plain, (np.concatenate([plain[0], before]), np.concatenate([plain[1], beside]))


def _highest(in_flight: Floats, rest: Floats) -> _Rows:
    """The rows that no other one is above in everything."""
    rows = np.unique(np.column_stack([in_flight, rest]), axis=0)[::-1]
    kept: list[Floats] = []
    for row in rows:
        if not any((other >= row).all() for other in kept):
            kept.append(row)
    table = np.stack(kept)
    return table[:, :-1], table[:, -1]
