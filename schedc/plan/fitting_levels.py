"""Fits mixes of levels under the memory of ranks: the mixes of stages that share ranks, chosen together.

What a rank holds after an op is linear in what a microbatch holds on each of its stages: microbatches in flight times
held, and the rest. So a choice fits where it does at every row (in flight, rest) of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.plan.level_mixes import Mix

ROUNDING = 1e-12
"""Share of the limit by which sums of memory may differ."""


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Stages whose levels are chosen, and the rows of all ranks that hold one of them.

    in_flight: [rows, stages] microbatches that are held. rest: [rows] other memory of the rank then.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    in_flight: Floats
    rest: Floats

    def held(self, mixes: Sequence[Mix]) -> float:
        """The peak with one mix for each stage."""
        return float(np.max(self.in_flight @ np.array([mix.held for mix in mixes]) + self.rest))


def groups_of(
    schedule: Schedule, stages: Sequence[int], constant: Floats, rest: Floats, whole: Floats
) -> tuple[list[RankGroup], list[RankGroup]]:
    """The stages in groups that share no rank, with their rows, and the same with an R before every backward.

    constant: [P] memory of each rank whatever runs. rest: [ops] what it holds after each op besides activations of
    these stages. whole: [stages of the schedule] activations of a microbatch behind its R.
    """
    members = _members(schedule, stages)
    plain, with_r = list[RankGroup](), list[RankGroup]()
    for own in members:
        ranks = [rank for rank in range(schedule.ranks) if set(schedule.placement.stage_of_chunk[rank].tolist()) & own]
        rows = [_rows(schedule, rank, sorted(own), rest, whole) for rank in ranks]
        for groups, number in ((plain, 0), (with_r, 1)):
            in_flight = np.concatenate([row[number][0] for row in rows])
            beside = np.concatenate([row[number][1] + constant[rank] for row, rank in zip(rows, ranks, strict=True)])
            groups.append(RankGroup(tuple(sorted(own)), tuple(ranks), *_highest(in_flight, beside)))
    return plain, with_r


def _members(schedule: Schedule, stages: Sequence[int]) -> list[set[int]]:
    """The stages in groups: two that a rank holds together are in one."""
    groups: list[set[int]] = []
    for held in schedule.placement.stage_of_chunk.tolist():
        own = set(held) & set(stages)
        if own:
            touching = [group for group in groups if group & own]
            groups = [group for group in groups if not group & own] + [own.union(*touching)]
    return sorted(groups, key=min)


_Rows = tuple[Floats, Floats]


def _rows(schedule: Schedule, rank: int, stages: list[int], rest: Floats, whole: Floats) -> tuple[_Rows, _Rows]:
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


def fitting(group: RankGroup, mixes: Sequence[Sequence[Mix]], limit: float) -> list[tuple[int, ...]]:
    """Choices, an index into the ``mixes`` of each stage, that fit; none where no choice does.

    mixes: by stage, most held first. For one or two stages these are all choices that no other one beats in
    time. For more it is one choice, which no exchange between two stages improves.
    """
    limit = limit * (1 + ROUNDING)
    held = [np.array([mix.held for mix in own]) for own in mixes]
    least = group.in_flight @ np.array([each.min() for each in held]) + group.rest
    if (least > limit).any():
        return []
    if len(mixes) == 1:
        return [(int(_first_fitting(group.in_flight[:, 0], group.rest, held[0], limit)),)]
    if len(mixes) == 2:
        return _pairs(group.in_flight, group.rest, held, mixes, limit)
    return [_exchanged(group, mixes, held, limit)]


def _first_fitting(in_flight: Floats, rest: Floats, held: Floats, limit: float) -> int:
    """The first of these, most held first, that fits at every row."""
    room = np.min(np.where(in_flight > 0, (limit - rest) / np.where(in_flight > 0, in_flight, 1.0), np.inf))
    return int(np.argmax(held <= room * (1 + ROUNDING)))


def _pairs(
    in_flight: Floats, rest: Floats, held: Sequence[Floats], mixes: Sequence[Sequence[Mix]], limit: float
) -> list[tuple[int, ...]]:
    """For each mix of the first stage the first of the second that fits, without choices that another one beats."""
    left = limit - rest - held[0][:, np.newaxis] * in_flight[:, 0]
    used = in_flight[:, 1] > 0
    room = np.min(left[:, used] / in_flight[used, 1], axis=1, initial=np.inf) * (1 + ROUNDING)
    room[(left[:, ~used] < 0).any(axis=1)] = -np.inf
    second = np.searchsorted(-held[1], -room)
    one = np.flatnonzero(second < held[1].size)
    preferred = np.array([mix.preferred for mix in mixes[1]])[second[one]]
    least = np.minimum.accumulate(np.concatenate([[np.inf], preferred[:-1]]))
    return [(int(first), int(second[first])) for first in one[preferred < least]]


def _exchanged(
    group: RankGroup, mixes: Sequence[Sequence[Mix]], held: Sequence[Floats], limit: float
) -> tuple[int, ...]:
    """From the least held on, the best two mixes of each pair of stages, until no pair improves."""
    choice: Int64 = np.array([int(each.argmin()) for each in held])
    improved = True
    while improved:
        improved = False
        for one in range(len(held)):
            for two in range(one + 1, len(held)):
                others = [number for number in range(len(held)) if number not in (one, two)]
                beside = group.rest + group.in_flight[:, others] @ np.array([held[n][choice[n]] for n in others])
                both = mixes[one], mixes[two]
                options = _pairs(group.in_flight[:, [one, two]], beside, [held[one], held[two]], both, limit)
                best = min(options, key=lambda option: _time(both, option))
                if _time(both, best) < _time(both, (choice[one], choice[two])) * (1 - ROUNDING):
                    choice[[one, two]] = best
                    improved = True
    return tuple(choice.tolist())


def _time(mixes: Sequence[Sequence[Mix]], choice: Sequence[int]) -> float:
    return sum(own[number].preferred for own, number in zip(mixes, choice, strict=True))


def least_times(group: RankGroup, mixes: Sequence[Sequence[Mix]], limit: float) -> list[float]:
    """[stages] the least preferred time of a stage, with the other stages of its ranks at the least they can hold."""
    limit = limit * (1 + ROUNDING)
    held = [np.array([mix.held for mix in own]) for own in mixes]
    least = np.array([each.min() for each in held])
    times = []
    for number, own in enumerate(held):
        beside = group.rest + group.in_flight @ least - group.in_flight[:, number] * least[number]
        first = _first_fitting(group.in_flight[:, number], beside, own, limit)
        times.append(mixes[number][first].preferred)
    return times


def least_sum(group: RankGroup, mixes: Sequence[Sequence[Mix]], limit: float) -> float:
    """A preferred time that no choice that fits undercuts, summed over the stages of the group.

    Each row alone is a knapsack over the stages. Layers may be split in it: the cheapest memory goes first.
    """
    limit, hulls = limit * (1 + ROUNDING), [_hull(own) for own in mixes]
    most = np.array([own[0].held for own in mixes])
    least = 0.0
    for in_flight, rest in zip(group.in_flight, group.rest, strict=True):
        excess = float(in_flight @ most + rest - limit)
        own = zip(in_flight.tolist(), hulls, strict=True)
        steps = [(time / (held * n), held * n) for n, hull in own if n > 0 for held, time in hull]
        spent = 0.0
        for price, freed in sorted(steps):
            if excess <= 0:
                break
            spent, excess = spent + price * min(freed, excess), excess - freed
        least = max(least, spent)
    return least


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
