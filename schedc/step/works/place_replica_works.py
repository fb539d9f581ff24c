"""Places what replicas of a rank do together beside compute: gathers and drops of parameters, sums of gradients.

A gather starts as late as its JOIN in front of the first use allows without a wait. This follows from the timeline
without works, and where gathers cannot but hold up the step, from the one with these. The first half of a sum starts
behind the last weight gradient of its stage. It is joined where the rank does not wait for it, at the latest at the end
of the stream. There the second half starts, which is joined at the end. Sums of what a REDUCE brings together first
stand behind the REDUCEs.

The places are a function of the order, the sizes and the times, so all replicas place the same works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.ir.op_tables import WEIGHT
from schedc.ir.works import WorkGroup, WorkKind
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import DEFAULT_PLACES, PlacedWorks, WorkPlace
from schedc.step.timeline import run_durations
from schedc.step.work_runs import run_with_works

_GROUPS = (WorkGroup.REPLICAS, WorkGroup.SAME_EXPERTS)


@dataclass(frozen=True, eq=False)
class ReplicaBytes:
    """Bytes of a stage that replicas sum or shard, each [stages].

    summed: gradients of dense parameters that are not sharded, over all replicas. expert_summed: gradients of experts,
    over the replicas that hold the same ones. sharded: dense parameters that are sharded, and as many gradients. last:
    gradients of weights that are tied to another rank, over all replicas behind their REDUCE; not in ``summed``.
    """

    summed: Floats
    expert_summed: Floats
    sharded: Floats
    last: Floats

    def scattered(self, group: WorkGroup) -> Floats:
        """[stages] what the first half of a group's sum moves."""
        return self.summed + self.sharded if group is WorkGroup.REPLICAS else self.expert_summed


@dataclass(frozen=True, eq=False)
class ShardingRoom:
    """What limits whole parameters. held: [cells] the most memory inside each, without them; most: [P] of each rank."""

    held: Floats
    most: Floats


class StagedWork(NamedTuple):
    """A work with its gaps, counted from the first of its rank, and its places there."""

    kind: WorkKind
    stage: int
    size: float
    group: WorkGroup
    start: int
    join: int
    places: tuple[int, int]


def place_replica_works(
    dependencies: Dependencies,
    sizes: ReplicaBytes,
    *,
    duration: Floats,
    latency: float,
    per_byte: tuple[float, float],
    ahead: int | None = None,
    training: bool = True,
    room: ShardingRoom | None = None,
) -> PlacedWorks:
    """The works of all ranks.

    duration: [cells] time of each; latency: time of a message. per_byte: time of a byte in one half of a sum, or in a
    gather, over all replicas and over those with the same experts. ahead: cells between the START of a gather and its
    use; by default as many as its time asks for. training: whether gradients are summed. room: where whole parameters
    exceed it, they are dropped between uses, the farthest first, and gathered again.
    """
    start, end = run_durations(dependencies, duration, latency)
    demand = ReplicaDemand(dependencies, sizes, per_byte, ahead, training, room)
    placed = demand.placed(start, end)
    lanes = run_with_works(dependencies, duration, latency, placed, lane_times(placed, dependencies, sizes, per_byte))
    if ahead is not None or not lanes.exposed[placed.works.kind == WorkKind.GATHER].any():
        return placed
    again = demand.placed(lanes.start, lanes.end)
    times = lane_times(again, dependencies, sizes, per_byte)
    closed = run_with_works(dependencies, duration, latency, again, times).closed
    return again if closed.max(initial=0.0) <= lanes.closed.max(initial=0.0) else placed


@dataclass(frozen=True, eq=False)
class ReplicaDemand:
    """What is asked for; the fields are arguments of `place_replica_works`."""

    dependencies: Dependencies
    sizes: ReplicaBytes
    per_byte: tuple[float, float]
    ahead: int | None
    training: bool
    room: ShardingRoom | None

    def placed(self, start: Floats, end: Floats) -> PlacedWorks:
        """The works by a timeline. start, end: [cells]."""
        dependencies, sizes, room = self.dependencies, self.sizes, self.room
        uses = _uses(dependencies)
        rows: list[tuple[int, StagedWork]] = []
        for rank in range(dependencies.rank_start.size - 1):
            low, high = dependencies.rank_start[rank : rank + 2].tolist()
            reach = np.concatenate([[0.0], end[low:high]])
            own = {
                stage: (first - low, last - low, trained - low) for stage, first, last, trained in uses.get(rank, ())
            }
            copied = _copied(dependencies, rank)
            stream = RankStream(reach, start[low:high], own, sizes, self.per_byte, self.ahead, self.training, copied)
            runs = {
                stage: [WholeRun(first, last)] for stage, (first, last, _) in own.items() if sizes.sharded[stage] > 0
            }
            if room is not None:
                cells = _cells_by_stage(dependencies, rank, list(runs))
                runs = stream.with_room(runs, cells, room.held[low:high], float(room.most[rank]))
            rows += [(low + rank, work) for work in stream.works(runs)]
        return _table(rows)


def lane_times(
    placed: PlacedWorks, dependencies: Dependencies, sizes: ReplicaBytes, per_byte: tuple[float, float]
) -> Floats:
    """[works] time of each on the lane; 0 for works that are not among replicas.

    The second half of a sum moves no gradients of sharded parameters; they are in the first sum of their stage. sizes,
    per_byte: as for `place_replica_works`.
    """
    works = placed.works
    moved = works.bytes.copy()
    spread = np.flatnonzero((works.kind == WorkKind.SPREAD) & (works.group == WorkGroup.REPLICAS))
    key = placed.rank_of(placed.start[spread], dependencies) * sizes.sharded.size + works.stage[spread]
    first = spread[np.unique(key, return_index=True)[1]]
    moved[first] -= sizes.sharded[works.stage[first]]
    return np.asarray(np.array([*per_byte, 0.0])[works.group] * moved)


class WholeRun(NamedTuple):
    """Cells of a rank between which a stage is whole. earliest: the first gap in which its gather may start."""

    first: int
    last: int
    earliest: int = 0


@dataclass(frozen=True, eq=False)
class RankStream:
    """A rank: when it reaches each gap and starts each cell, and what its stages need.

    reach: [gaps]; start: [cells]. uses: first and last cell of each stage, and that of its last weight gradient.
    copied: stages whose gradients a REDUCE brings together first.
    """

    reach: Floats
    start: Floats
    uses: dict[int, tuple[int, int, int]]
    sizes: ReplicaBytes
    per_byte: tuple[float, float]
    ahead: int | None
    training: bool
    copied: frozenset[int]

    @property
    def last(self) -> int:
        """The gap behind the cells."""
        return int(self.start.size)

    def works(self, runs: dict[int, list[WholeRun]]) -> Iterator[StagedWork]:
        """All works of the rank. runs: each time that a stage is whole, by stage."""
        gathers = self.gathers(runs)
        yield from gathers
        if self.training:
            yield from self.sums(gathers)
        for stage, times in runs.items():
            for run in times:
                size, gap = float(self.sizes.sharded[stage]), run.last + 1
                yield StagedWork(WorkKind.DROP, stage, size, WorkGroup.LOCAL, gap, gap, _default(WorkKind.DROP))

    def gathers(self, runs: dict[int, list[WholeRun]]) -> list[StagedWork]:
        """A gather in front of each run, as late as no later one has to wait for it; in the order of the uses."""
        needs = sorted((run.first, stage, run.earliest) for stage, times in runs.items() for run in times)
        gathers: list[StagedWork] = []
        due = np.inf
        for first, stage, earliest in reversed(needs):
            size = float(self.sizes.sharded[stage])
            due = min(due, float(self.start[first])) - size * self.per_byte[0]
            gap = int(np.searchsorted(self.reach, due, side="right")) - 1 if self.ahead is None else first - self.ahead
            gap = min(max(gap, earliest, 0), first)
            kind = WorkKind.GATHER
            gathers.append(StagedWork(kind, stage, size, WorkGroup.REPLICAS, gap, first, _default(kind)))
        return gathers[::-1]

    def with_room(
        self, runs: dict[int, list[WholeRun]], cells: dict[int, Int64], held: Floats, most: float
    ) -> dict[int, list[WholeRun]]:
        """The runs with drops between far uses, the farthest first, as long as a cell holds too much.

        A gather then starts only where the cells up to its use have room. Buckets of sums count from the cell on behind
        which they are there. cells: those that use each stage. held:
        [cells] memory without whole parameters; most: that of the rank.
        """
        size, total = self.sizes.sharded, held.copy()
        for stage, times in runs.items():
            total[times[0].first : times[0].last + 1] += size[stage]
        for stage, (_, _, trained) in self.uses.items() if self.training else ():
            buckets = sum(self.sizes.scattered(group)[stage] for group in _GROUPS)
            total[trained if trained >= 0 and stage not in self.copied else total.size :] += buckets
        pauses = [
            (int(before - after), stage, int(before), int(after))
            for stage, used in cells.items()
            for before, after in pairwise(used)
            if after - before > 1
        ]
        cut: dict[int, set[tuple[int, int]]] = {stage: set() for stage in runs}
        for _, stage, before, after in sorted(pauses):
            if (total[before + 1 : after] > most).any():
                total[before + 1 : after] -= size[stage]
                cut[stage].add((before, after))
        edges = {
            stage: [times[0].first, *(cell for pause in sorted(cut[stage]) for cell in pause), times[0].last]
            for stage, times in runs.items()
        }
        parts = sorted((edge[n], stage, edge[n + 1]) for stage, edge in edges.items() for n in range(0, len(edge), 2))
        result: dict[int, list[WholeRun]] = {stage: [] for stage in runs}
        for first, stage, last in parts:
            gap, floor = first, result[stage][-1].last + 1 if result[stage] else 0
            begin = self.start[first] - size[stage] * self.per_byte[0]
            while gap > floor and self.reach[gap] > begin and total[gap - 1] + size[stage] <= most:
                gap -= 1
                total[gap] += size[stage]
            result[stage].append(WholeRun(first, last, gap))
        return result

    def sums(self, gathers: list[StagedWork]) -> Iterator[StagedWork]:
        """Both halves of the sums, in the order in which the lane runs them beside the gathers."""
        free, number = 0.0, 0
        queue: list[tuple[int, int, int, WorkKind, int, WorkGroup, float, float]] = []

        def push(gap: int, place: int, kind: WorkKind, stage: int, group: WorkGroup, size: float, moved: float) -> None:
            nonlocal number
            number += 1
            heappush(queue, (gap, place, number, kind, stage, group, size, moved))

        for gather in gathers:
            push(gather.start, WorkPlace.COME, WorkKind.GATHER, gather.stage, gather.group, gather.size, gather.size)
        for gap, place, stage, group, size, spread in self._first_halves():
            push(gap, place, WorkKind.SCATTER, stage, group, size, spread)
        while queue:
            gap, place, _, kind, stage, group, size, moved = heappop(queue)
            time = (size if kind is WorkKind.SCATTER else moved) * self.per_byte[group]
            free = max(free, float(self.reach[gap])) + time
            if kind is WorkKind.SPREAD:
                yield StagedWork(kind, stage, size, group, gap, self.last, (place, WorkPlace.CLOSE))
            if kind is not WorkKind.SCATTER:
                continue
            join = max(gap, min(int(np.searchsorted(self.reach, free)), self.last))
            at_end = join == self.last
            summed, spreads = (WorkPlace.SUMMED, WorkPlace.SPREAD) if at_end else (WorkPlace.LEFT, WorkPlace.COME)
            yield StagedWork(kind, stage, size, group, gap, join, (place, summed))
            push(join, spreads, WorkKind.SPREAD, stage, group, size, moved)

    def _first_halves(self) -> Iterator[tuple[int, int, int, WorkGroup, float, float]]:
        """(gap, place, stage, group, bytes, bytes of the second half) of the first half of each sum."""
        for stage, (_, _, trained) in sorted(self.uses.items(), key=lambda item: (item[1][2], item[0])):
            late = stage in self.copied
            gap, place = (self.last, WorkPlace.SUM) if late else (trained + 1, WorkPlace.LEAVE)
            for group in _GROUPS:
                size = float(self.sizes.scattered(group)[stage])
                shards = float(self.sizes.sharded[stage]) if group is WorkGroup.REPLICAS else 0.0
                if size > 0 and trained >= 0:
                    yield gap, place, stage, group, size, size - shards
            if (tied := float(self.sizes.last[stage])) > 0 and trained >= 0:
                yield self.last, WorkPlace.SUM, stage, WorkGroup.REPLICAS, tied, tied


def _default(kind: WorkKind) -> tuple[int, int]:
    start, join = DEFAULT_PLACES[:, kind].tolist()
    return start, join


def _uses(dependencies: Dependencies) -> dict[int, list[tuple[int, int, int, int]]]:
    """(stage, first cell, last cell, cell of the last weight gradient or -1) of the stages of each rank."""
    schedule = dependencies.schedule
    key = schedule.rank.astype(np.int64) * schedule.stages + schedule.stage
    cell = dependencies.cell_of.astype(np.int64)
    slots = schedule.ranks * schedule.stages
    first, last, trained = np.full(slots, cell.size, np.int64), np.full(slots, -1), np.full(slots, -1)
    first[key[::-1]] = cell[::-1]  # the last one of equal keys stays
    last[key] = cell
    weights = np.flatnonzero(WEIGHT[schedule.kind])
    trained[key[weights]] = cell[weights]
    uses: dict[int, list[tuple[int, int, int, int]]] = {}
    for slot in np.flatnonzero(last >= 0).tolist():
        rank, stage = divmod(slot, schedule.stages)
        uses.setdefault(rank, []).append((stage, int(first[slot]), int(last[slot]), int(trained[slot])))
    return uses


def _copied(dependencies: Dependencies, rank: int) -> frozenset[int]:
    """The stages of a rank that another rank holds, too."""
    homes = dependencies.schedule.placement.rank_of_stage
    mine = (homes == rank).any(0) & (homes != rank).any(0)
    return frozenset(np.flatnonzero(mine).tolist())


def _cells_by_stage(dependencies: Dependencies, rank: int, stages: list[int]) -> dict[int, Int64]:
    """The cells of a rank, counted from its first, that use each of these stages."""
    schedule = dependencies.schedule
    rows = slice(*schedule.rank_start[rank : rank + 2].tolist())
    own, cells = schedule.stage[rows], dependencies.cell_of[rows].astype(np.int64) - dependencies.rank_start[rank]
    return {stage: np.unique(cells[own == stage]) for stage in stages}


def _table(rows: list[tuple[int, StagedWork]]) -> PlacedWorks:
    """The works as a table. rows: first gap of the rank, and the work."""
    if not rows:
        return PlacedWorks.none()
    first = np.array([gap for gap, _ in rows], np.int64)
    kind, stage, size, group, start, join, places = zip(*(work for _, work in rows), strict=True)
    columns = np.array(kind, np.int8), np.array(stage, np.int32), np.full(len(rows), -1, np.int32), np.array(size)
    gaps = first + np.array(start), first + np.array(join)
    at, until = np.array(places, np.int8).T
    return PlacedWorks.of(*columns, *gaps, np.array(group, np.int8), (at, until))
