"""Floors of steps whose microbatches cost unequally: for every order of the ops, and of the microbatches.

The theorem of `schedc.search.floors` holds with any heads and tails that no order undercuts. Here these are the paths
of one microbatch alone, so that no sequence of microbatches is assumed. Any of them may be the first or the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int64, repeat
from schedc.ir.ops import OpKind
from schedc.search.floors import RankFloor, most_work, steps_left
from schedc.search.ticks import grid_for
from schedc.step.costs.costs import StageCosts
from schedc.step.row_bound import least_work
from schedc.step.row_order import MicrobatchPricer

F, I, W, B = OpKind.F, OpKind.I, OpKind.W, OpKind.B  # noqa: E741


@dataclass(frozen=True, eq=False)
class PathTimes:
    """Paths of a microbatch, one to or from each slot of a rank. A slot is a stage of a pipe on the rank.

    time: [slots] ticks for a cost of 1. hops: [slots] messages on the way.
    """

    time: Int64
    hops: Int64

    def least(self, cost: int, latency: int) -> int:
        """The shortest path of a microbatch of this cost. latency: ticks of a message."""
        return int((self.time * cost + self.hops * latency).min())


@dataclass(frozen=True, eq=False)
class OpsOfRank:
    """The ops of one rank by slot. Times are in ticks for a cost of 1, memory in ticks of its grid.

    forward: [slots] longest time of an F.
    left: [2, slots] longest time of a backward without its W, and of the W.
    held: [2, slots] memory until the backward has ended, and until the W has; 0 without a W.
    starts, first: paths to the F and to the backward. rest, ends: paths from the F, and from the last op.
    apart: whether the two windows of the theorem are disjoint. capacity: memory of the rank.
    """

    forward: Int64
    left: Int64
    held: Int64
    starts: PathTimes
    first: PathTimes
    rest: PathTimes
    ends: PathTimes
    apart: bool
    capacity: int

    @cached_property
    def alike(self) -> tuple[bytes | int, ...]:
        """What ranks have in common whose memory has room for the same work."""
        return self.forward.tobytes(), self.left.tobytes(), self.held.tobytes(), self.capacity

    def fitting(self, costs: Int64) -> tuple[int, int]:
        """The most work of forwards that fit into the memory together, and of backwards and W that are left of such."""
        held = repeat(self.held.ravel(), costs.size).reshape(2, -1)
        left = (self.left[:, :, None] * costs).reshape(2, -1)
        return (
            most_work(held[0], (self.forward[:, None] * costs).ravel(), self.capacity),
            most_work(*steps_left(held, left), self.capacity, sizes=held.ravel()),
        )

    def floor(self, rank: int, work: int, fitting: tuple[int, int], cost: int, latency: int) -> RankFloor:
        """The floor seen from this rank. work: the least of the rank. cost: the smallest one of a microbatch.

        fitting: as of the method. latency: ticks of a message.
        """
        return RankFloor(
            rank=rank,
            work=work,
            starts=self.starts.least(cost, latency),
            ends=self.ends.least(cost, latency),
            backward=self.first.least(cost, latency),
            filled=fitting[0],
            rest=self.rest.least(cost, latency),
            left=fitting[1],
            apart=self.apart,
            capacity=self.capacity,
        )


@dataclass(frozen=True, eq=False)
class UnequalFloor:
    """What no step with a program's ops undercuts. ranks: [P] their ops. whole: [pipes] paths to the end and back."""

    pricer: MicrobatchPricer
    ranks: tuple[OpsOfRank, ...]
    whole: PathTimes

    @cached_property
    def distinct(self) -> tuple[OpsOfRank, ...]:
        """A rank of each kind."""
        return tuple({ops.alike: ops for ops in self.ranks}.values())

    def ticks(self, costs: Int64) -> int:
        """The floor in the unit of `MicrobatchPricer.makespans`. costs: [M] whole numbers of at most 16 bits."""
        ascending, latency = np.sort(costs), self.pricer.latency * (int(costs.sum()) // costs.size)
        work = least_work(self.pricer.parts, ascending[None].astype(np.float64)).astype(np.int64).tolist()
        fitting, smallest = {ops.alike: ops.fitting(ascending) for ops in self.distinct}, int(ascending[0])
        floors = [
            ops.floor(rank, work[rank], fitting[ops.alike], smallest, latency).makespan
            for rank, ops in enumerate(self.ranks)
        ]
        return max(*floors, self.whole.least(int(ascending[-1]), latency))


def unequal_floor(pricer: MicrobatchPricer, costs: StageCosts, caps: Floats) -> UnequalFloor | None:
    """The floor of a program's ops; None with recomputations or segments, for which it is not proved.

    pricer: of the program. costs: of its stages, for the memory of activations. caps: [P] memory of each rank.
    """
    schedule = pricer.parts.dependencies.schedule
    if schedule.segments > 1 or (schedule.kind == OpKind.R).any():
        return None
    grid = grid_for(np.concatenate([costs.activation, costs.pending_weight, caps]), max(float(caps.max()), 1.0))
    times, room = _StageTimes.of(pricer), grid.down(caps * (1 + 1e-12))
    held = np.stack([grid.down(costs.activation), np.where(times.split, grid.down(costs.pending_weight), 0)])
    placed = schedule.placement.rank_of_stage
    hops = np.cumsum(np.pad(placed[:, 1:] != placed[:, :-1], ((0, 0), (1, 0))), axis=1).astype(np.int64)
    whole = PathTimes(np.full(len(placed), times.through), 2 * hops[:, -1])
    ranks = (_rank_ops(rank, pricer, times, held, hops, int(room[rank])) for rank in range(schedule.ranks))
    return UnequalFloor(pricer, tuple(ranks), whole)


@dataclass(frozen=True, eq=False)
class _StageTimes:
    """[stages] ticks of a stage's ops for a cost of 1. alone: [kinds, stages] of ops in no pair.

    split: whether some backwards are split, and may leave a W as the last op. through: from the first F to the end.
    starts, first, rest, ends: as of `OpsOfRank`.
    """

    alone: Int64
    split: Bools
    through: int
    starts: Int64
    first: Int64
    rest: Int64
    ends: Int64

    @classmethod
    def of(cls, pricer: MicrobatchPricer) -> _StageTimes:
        known, stages = pricer.parts.dependencies, pricer.parts.dependencies.schedule.stages
        schedule = known.schedule
        alone, count = np.zeros((len(OpKind), stages), np.int64), np.zeros((len(OpKind), stages), np.int64)
        alone[schedule.kind, schedule.stage] = pricer.parts.ops.astype(np.int64)
        np.add.at(count, (schedule.kind, schedule.stage), 1)
        least, pairs = alone.copy(), np.flatnonzero(known.pairs)
        for rows in (known.first[pairs], known.second[pairs]):
            paired = pricer.parts.whole[pairs].astype(np.int64)
            np.minimum.at(least, (schedule.kind[rows], schedule.stage[rows]), paired)
        split, whole, none = count[I] > 0, count[B] > 0, np.iinfo(np.int64).max
        step, back = least[F], np.minimum(np.where(split, least[I], none), np.where(whole, least[B], none))
        done = np.minimum(np.where(split, least[I] + least[W], none), np.where(whole, least[B], none))
        before, after = np.cumsum(step) - step, np.cumsum(back[::-1])[::-1] - back
        down = np.cumsum(back) - back  # backwards of the stages in front
        ends = np.where(split, 0, np.where(np.arange(stages) > 0, down - back[0] + done[0], 0))
        rest = step.sum() - before - step + back[1:].sum() + done[0]
        return cls(alone, split, int(step[0] + rest[0]), before, step.sum() + after, rest, ends)


def _rank_ops(
    rank: int, pricer: MicrobatchPricer, times: _StageTimes, held: Int64, hops: Int64, capacity: int
) -> OpsOfRank:
    """The ops of a rank. held: [2, stages] memory as of `OpsOfRank`. hops: [pipes, stages] messages up to a stage."""
    known, placement = pricer.parts.dependencies, pricer.parts.dependencies.schedule.placement
    pipe, stage = np.nonzero(placement.rank_of_stage == rank)
    paired = (known.rank == rank) & known.pairs & (known.schedule.kind[known.first] == F)
    places = np.diff(placement.first_microbatch)[pipe]
    weight = np.where(times.split, times.alone[W], 0)[stage]
    longest = np.maximum(times.alone[B], times.alone[I] + times.alone[W])[stage]
    far, near = hops[pipe, -1], hops[pipe, stage]
    return OpsOfRank(
        forward=times.alone[F][stage],
        left=np.stack([longest - weight, weight]),
        held=held[:, stage],
        starts=PathTimes(times.starts[stage], near),
        first=PathTimes(times.first[stage], 2 * far - near),
        rest=PathTimes(times.rest[stage], 2 * far - near),
        ends=PathTimes(times.ends[stage], np.where(times.split[stage], 0, near)),
        apart=bool(paired.any()) or int((held[0, stage] * places).sum()) > capacity,
        capacity=capacity,
    )
