"""Decides exactly whether layers fit on stages within limits, for any placement of stages on ranks.

The decoder layers and predictions of a model are at most three *runs* of equal parts: dense layers, MoE layers,
predictions. In a contiguous layout run 1 ends in some stage x, and run 3 begins in some stage y >= x:

    stage      0 .. x-1     x           x+1 .. y-1   y            y+1 ..
    may hold   run 1        runs 1, 2   run 2        runs 2, 3    run 3

Any counts per stage that respect this table are a contiguous layout, and every contiguous layout is one of these. For
one (x, y), ranks are independent except for the sums over ranks. The decision has two steps:

1. For every rank and every (p, t), parts of runs 1 and 3 on it: the most parts of run 2 within the rank's limits.
2. A dynamic program over the ranks. Its state is the number of parts of runs 1 and 3 placed so far, its value the most
   parts of run 2.

Layers fit if for some (x, y) the program reaches all of run 2. Fewer parts of run 2 than the maximum always fit, since
costs are not negative.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Int64

Counts = tuple[int, int, int]
"""(run 1, run 2, run 3): a number of parts each."""

_NONE = -(1 << 40)
_TRIED = 64
"""Splits that are completed to choose the evenest."""


class Limits(NamedTuple):
    """The most time of a rank, time of a stage and memory of a rank, in the units of a `FittingProblem`."""

    rank: int
    stage: int
    memory: int


@dataclass(frozen=True, eq=False)
class FittingProblem:
    """Layers to place. Times and memory are integers, each in any one unit.

    groups: the stages of each rank; ranks with the same stages are one group, and no stage is in two groups.
    runs: number of parts of each run. time: time of one part of each run.
    fixed_time, fixed_memory: [stages] time and memory of embedding and head. memory: [stages, 3] memory of one part of
    each run. weight: [stages] orders the stages of a rank by ascending ``memory``, for every run.
    width: the most parts of runs 1 and 2 in a stage. last: the last stage that may hold parts of run 3.
    """

    groups: tuple[tuple[int, ...], ...]
    runs: Counts
    time: Counts
    fixed_time: tuple[int, ...]
    fixed_memory: tuple[int, ...]
    memory: tuple[Counts, ...]
    weight: tuple[float, ...]
    width: int
    last: int

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.fixed_time)

    @cached_property
    def splits(self) -> Int64:
        """[splits, 2] every (x, y)."""
        first, _, third = self.runs
        starts = range(self.last + 1 if third else self.stages) if first else range(1)
        ends = range(self.last + 1) if third else (self.stages - 1,)
        return np.array([(x, y) for x in starts for y in ends if x <= y], np.int64)

    @cached_property
    def patterns(self) -> tuple[tuple[Int64, Int64], ...]:
        """Per group: its distinct role tables [patterns, stages of the group, 3], and [splits] the table of each split.

        A role table says which runs each stage may hold.
        """
        x, y = self.splits[:, :1], self.splits[:, 1:]
        tables = []
        for group in self.groups:
            stage = np.array(sorted(group, key=lambda s: (self.weight[s], s)))[None, :]
            roles = np.stack([stage <= x, (x <= stage) & (stage <= y), (y <= stage) & (stage <= self.last)], axis=2)
            distinct, which = np.unique(roles.reshape(len(roles), -1), axis=0, return_inverse=True)
            tables.append((distinct.reshape(-1, *roles.shape[1:]).astype(np.int64), which.reshape(-1)))
        return tuple(tables)

    def load(self, group: int, placed: Sequence[Counts]) -> int:
        """Time of a rank of a group; placed: [stages] counts."""
        return sum(self.stage_load(stage, placed[stage]) for stage in self.groups[group])

    def stage_load(self, stage: int, counts: Counts) -> int:
        """Time of a stage with these counts."""
        return self.fixed_time[stage] + sum(c * n for c, n in zip(self.time, counts, strict=True))

    def held(self, group: int, placed: Sequence[Counts]) -> int:
        """Peak memory of a rank of a group; placed: [stages] counts."""
        return sum(
            self.fixed_memory[s] + sum(m * n for m, n in zip(self.memory[s], placed[s], strict=True))
            for s in self.groups[group]
        )


def fits(problem: FittingProblem, limits: Limits) -> bool:
    """Whether a layout within the limits exists."""
    return bool((_reached(problem, limits)[-1][:, -1, -1] >= problem.runs[1]).any())


def place(problem: FittingProblem, limits: Limits) -> list[Counts] | None:
    """[stages] counts of a layout within the limits; None where no layout fits.

    The freedom within the limits is used to make loads even. Up to `_TRIED` of the splits that fit are completed. The
    result is the one with the least sum of squares of the stages' loads.
    """
    reached = _reached(problem, limits)
    final = reached[-1][:, -1, -1]
    possible = np.flatnonzero(final >= problem.runs[1])
    if not len(possible):
        return None
    most_room = possible[np.argsort(-final[possible], kind="stable")][:_TRIED]
    tried = (_evened(problem, limits, _traced(problem, limits, reached, int(split)), int(split)) for split in most_room)
    return min(tried, key=lambda placed: sum(problem.stage_load(s, counts) ** 2 for s, counts in enumerate(placed)))


def _traced(problem: FittingProblem, limits: Limits, reached: Sequence[Int64], split: int) -> list[Counts]:
    """[stages] counts behind the last state of the dynamic program for one split; run 2 may have surplus parts."""
    p, t = problem.runs[0], problem.runs[2]
    placed: list[Counts] = [(0, 0, 0)] * problem.stages
    for group in reversed(range(len(problem.groups))):
        roles, which = problem.patterns[group]
        rank = _RankFit(problem, limits, group, roles[which[split]])
        want, before = reached[group + 1][split, p, t], reached[group][split]
        for dp, dt in product(range(p + 1), range(t + 1)):
            most, counts = rank.best(dp, dt)
            if most >= 0 and before[p - dp, t - dt] + most == want:
                break
        for stage, parts in counts.items():
            placed[stage] = parts
        p, t = p - dp, t - dt
    return placed


def _evened(problem: FittingProblem, limits: Limits, placed: list[Counts], split: int) -> list[Counts]:
    """The counts without surplus parts of run 2, its other parts spread over the stages of each rank.

    Among equally loaded ranks the last one is relieved: in a pipeline its work delays the others least.
    """
    group_of = {stage: group for group, stages in enumerate(problem.groups) for stage in stages}
    load = [problem.load(group, placed) for group in range(len(problem.groups))]

    def change(stage: int, by: int) -> None:
        placed[stage] = (placed[stage][0], placed[stage][1] + by, placed[stage][2])
        load[group_of[stage]] += by * problem.time[1]

    for _ in range(sum(counts[1] for counts in placed) - problem.runs[1]):
        change(
            max(
                (stage for stage, counts in enumerate(placed) if counts[1]),
                key=lambda stage: (load[group_of[stage]], problem.stage_load(stage, placed[stage]), stage),
            ),
            -1,
        )
    x, y = problem.splits[split]
    for group, stages in enumerate(problem.groups):
        shared = [stage for stage in stages if x <= stage <= y]
        while shared:
            full = max(shared, key=lambda stage: (problem.stage_load(stage, placed[stage]), stage))
            free = min(shared, key=lambda stage: (problem.stage_load(stage, placed[stage]), stage))
            gap = problem.stage_load(full, placed[full]) - problem.stage_load(free, placed[free])
            places_left = problem.width - sum(placed[free][:2])
            if gap <= problem.time[1] or not placed[full][1] or not places_left:
                break
            change(full, -1)
            change(free, +1)
            if problem.held(group, placed) > limits.memory:
                change(full, +1)
                change(free, -1)
                break
    return placed


def _reached(problem: FittingProblem, limits: Limits) -> list[Int64]:
    """[splits, parts of run 1, parts of run 3] the most parts of run 2 on the first 0, 1, ... groups."""
    first, _, third = problem.runs
    start = np.full((len(problem.splits), first + 1, third + 1), _NONE, np.int64)
    start[:, 0, 0] = 0
    reached = [start]
    tables: dict[Hashable, Int64] = {}  # most ranks are alike
    for group, (patterns, which) in enumerate(problem.patterns):
        of_patterns = []
        for roles in patterns:
            rank = _RankFit(problem, limits, group, roles)
            if rank.key not in tables:
                tables[rank.key] = rank.table()
            of_patterns.append(tables[rank.key])
        most = np.stack(of_patterns)[which]
        state = np.full_like(start, _NONE)
        for p, t in product(range(first + 1), range(third + 1)):
            if (most[:, p, t] < 0).all():
                continue
            sums = reached[-1][:, : first + 1 - p, : third + 1 - t] + most[:, p, t, None, None]
            np.maximum(state[:, p:, t:], sums, out=state[:, p:, t:])
        reached.append(state)
    return reached


class _RankFit:
    """The stages of one rank, lightest in memory first, with the runs that they may hold under one split.

    Its limits are what the rank's fixed costs leave of time and memory.
    """

    def __init__(self, problem: FittingProblem, limits: Limits, group: int, roles: Int64) -> None:
        self.problem = problem
        stages = sorted(problem.groups[group], key=lambda s: (problem.weight[s], s))
        self.stages = stages
        self.roles = [tuple(map(bool, role)) for role in roles]
        self.time = limits.rank - sum(problem.fixed_time[s] for s in stages)
        self.memory = limits.memory - sum(problem.fixed_memory[s] for s in stages)
        self.rooms = [limits.stage - problem.fixed_time[s] for s in stages]
        self.possible = min(self.time, self.memory, *self.rooms) >= 0
        shared = [[i for i, role in enumerate(self.roles) if role[run] and role[1]] for run in (0, 2)]
        # For runs 1 and 3: the rank's stage x or y, where the run meets run 2, or None.
        self.meets = [which[0] if which else None for which in shared]
        self.memories = tuple(problem.memory[s] for s in stages)
        self.key = (roles.tobytes(), self.time, self.memory, tuple(self.rooms), self.memories)

    def table(self) -> Int64:
        """[parts of run 1, parts of run 3] the most parts of run 2, by `best`."""
        first, _, third = self.problem.runs
        rows = [[self.best(p, t)[0] for t in range(third + 1)] for p in range(first + 1)]
        return np.where(np.array(rows) < 0, _NONE, rows)

    def best(self, p: int, t: int) -> tuple[int, dict[int, Counts]]:
        """The most parts of run 2 beside p of run 1 and t of run 3, and the counts of each stage; -1 where none fit."""
        best: tuple[int, dict[int, Counts]] = (-1, {})
        c1, _, c3 = self.problem.time
        if not self.possible or c1 * p + c3 * t > self.time:
            return best
        for px, ty in product(self._shares(p, 0, 0), self._shares(t, 2, 1)):
            counts = self._filled(p, t, px, ty)
            if counts is not None and (most := sum(count[1] for count in counts)) > best[0]:
                best = (most, dict(zip(self.stages, counts, strict=True)))
        return best

    def _shares(self, parts: int, run: int, end: int) -> range:
        """Numbers of parts of run 1 or 3 to try in the stage that they share with run 2.

        The fewest possible leave most room for run 2. More pay only where memory per part differs between stages.
        """
        if self.meets[end] is None:
            return range(1)
        if len(set(self.memories)) > 1:
            return range(parts + 1)
        cost, width = self.problem.time[run], self.problem.width if run == 0 else parts
        alone = sum(
            _whole(room, cost, min(parts, width))
            for i, room in enumerate(self.rooms)
            if self.roles[i][run] and i != self.meets[end]
        )
        return range(max(0, parts - alone), max(0, parts - alone) + 1)

    def _filled(self, p: int, t: int, px: int, ty: int) -> list[Counts] | None:
        """[stages of the rank] counts with px parts of run 1 in stage x, ty of run 3 in stage y, the most of run 2."""
        problem, number = self.problem, len(self.stages)
        memory, rooms, places = self.memory, list(self.rooms), [problem.width] * number
        filled = []
        for run, parts, share, end in ((0, p, px, 0), (2, t, ty, 1)):
            meets = self.meets[end]
            counts = [0] * number
            limited = run == 0
            for i in range(number) if parts else ():
                if not self.roles[i][run]:
                    continue
                wanted = share if i == meets else parts - share - sum(c for k, c in enumerate(counts) if k != meets)
                cap = _whole(rooms[i], problem.time[run], min(wanted, places[i]) if limited else wanted)
                if i == meets and cap < wanted:
                    return None
                counts[i] = cap
                rooms[i] -= cap * problem.time[run]
                places[i] -= cap if limited else 0
                memory -= cap * problem.memory[self.stages[i]][run]
            if sum(counts) != parts or memory < 0:
                return None
            filled.append(counts)
        left = self.time - p * problem.time[0] - t * problem.time[2]
        most = [0] * number
        for i, stage in enumerate(self.stages):
            if self.roles[i][1]:
                cap = _whole(min(rooms[i], left), problem.time[1], min(places[i], problem.runs[1]))
                most[i] = _whole(memory, problem.memory[stage][1], cap)
                left -= most[i] * problem.time[1]
                memory -= most[i] * problem.memory[stage][1]
        return list(zip(filled[0], most, filled[1], strict=True))


def _whole(room: int, cost: int, most: int) -> int:
    """How many parts of a cost fit into a room, at most ``most``."""
    return min(most, room // cost) if cost else most
