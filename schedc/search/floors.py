"""Floors: the least makespan of any order within a memory cap, rank by rank, in closed form (docs/inside/floors.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from schedc.ir.arrays import Bools, Int64, bincount
from schedc.ir.op_tables import TURN
from schedc.search.bounds import OpWindows


@dataclass(frozen=True)
class RankFloor:
    """What no order of a problem undercuts, seen from one rank. Times are in ticks, memory in ticks of its grid.

    work: all cells of the rank, in as many pairs as may be made. starts: time until the rank has something to run.
    ends: least time that follows the last cell of the rank.
    backward: time before which the rank runs forwards alone. filled: the longest work of forwards that fit into the
        cap together.
    rest: time that follows the rank's last forward at least. left: the longest work of the backwards and weight
        gradients of what fits into the cap together.
    apart: whether the two windows, before ``backward`` and after the last forward, are disjoint in every order.
    capacity: memory of the rank; None without a cap.
    pairs: most pairs that may be made. gain: ticks by which a pair is at most shorter than its two ops.
    share: part of the gain that a forward alone costs before ``backward``. A backward alone costs the rest after the
        last forward. ``filled`` and ``left`` are less these costs. All three are 0 where pairs are not made.
    """

    rank: int
    work: int
    starts: int
    ends: int
    backward: int
    filled: int
    rest: int
    left: int
    apart: bool
    capacity: int | None
    pairs: int = 0
    gain: int = 0
    share: int = 0

    @property
    def before(self) -> int:
        """Idle time of the rank before ``backward``, and what its forwards there cost as they are in no pair."""
        return max(self.starts, self.backward - self.filled)

    @property
    def behind(self) -> int:
        """Idle time of the rank after its last forward, and what its backwards there cost as they are in no pair."""
        return max(self.ends, self.rest - self.left)

    @property
    def idle(self) -> int:
        """Idle time of the rank in the step, its bubble, and what ops cost that are in no pair."""
        both, one = self.before + self.behind, max(self.before + self.ends, self.starts + self.behind)
        if self.apart:
            return both
        paired = min(both, self.pairs * self.gain + self.starts + self.ends)  # disjoint windows, or no pair at all
        return max(one, paired) if self.gain else one

    @property
    def makespan(self) -> int:
        """Scalar, in ticks: the makespan that no order undercuts."""
        return self.work + self.idle


def rank_floors(windows: OpWindows) -> list[RankFloor]:
    """The floor of the makespan seen from each rank that has forwards. The largest of them holds for the problem."""
    items, start = _Items(windows), windows.problem.dependencies.rank_start
    ranks = [rank for rank in range(start.size - 1) if items.forward[start[rank] : start[rank + 1]].any()]
    return [max(_shared_floors(items, rank), key=lambda floor: floor.makespan) for rank in ranks]


@dataclass(frozen=True, eq=False)
class _Items:
    """What a rank holds, a microbatch on a stage each, and the cells that work on it."""

    windows: OpWindows

    @cached_property
    def row(self) -> Int64:
        """[3, items] row of the F, of the I or B, and of the W of each item; -1 without a W."""
        schedule = self.windows.problem.schedule
        slot = schedule.stage.astype(np.int64) * schedule.microbatches + schedule.microbatch
        row = np.full((3, schedule.stages * schedule.microbatches), -1)
        row[TURN[schedule.kind], slot] = np.arange(len(schedule))
        return row

    @cached_property
    def cell(self) -> Int64:
        """[3, items] cell of each row; -1 without a W."""
        return np.where(self.row >= 0, self.windows.problem.dependencies.cell_of[self.row], -1)

    @cached_property
    def forward(self) -> Bools:
        """[cells] whether a cell has an F, alone or in a pair."""
        return self._has(self.row[0])

    @cached_property
    def backward(self) -> Bools:
        """[cells] whether a cell has an I, B or W."""
        return self._has(self.row[1:].ravel())

    def _has(self, rows: Int64) -> Bools:
        has = np.zeros(len(self.windows.problem), bool)
        has[self.windows.problem.dependencies.cell_of[rows[rows >= 0]]] = True
        return has

    @cached_property
    def held(self) -> Int64:
        """[2, items] memory of an item until its backward has ended, and until its W has; 0 without a W."""
        problem, holds = self.windows.problem, self.windows.problem.holds
        at_start = bincount(holds.taken[~holds.late], holds.amount[~holds.late], len(problem)).astype(np.int64)
        at_end = bincount(holds.taken[holds.late], holds.amount[holds.late], len(problem)).astype(np.int64)
        until = np.full(len(problem), -1)
        until[holds.taken[~holds.late]] = holds.freed[~holds.late]
        first, second, weight = self.cell
        pending = np.where(until[first] == weight, at_start[first], at_end[second])
        return np.stack([at_start[first], np.where(weight >= 0, pending, 0)])

    @cached_property
    def left(self) -> Int64:
        """[2, items] work of an item's backward and of its W behind the last forward: none of cells with a forward."""
        duration = self.windows.problem.duration
        work = np.where(self.cell[1:] >= 0, duration[self.cell[1:]], 0)
        return np.where((self.cell[1:] >= 0) & ~self.forward[self.cell[1:]], work, 0)


def _shared_floors(items: _Items, rank: int) -> Iterator[RankFloor]:
    """The floor seen from a rank; where pairs are made, one for each of three shares of the gain."""
    gain = int(items.windows.problem.gain[rank])
    for share in sorted({0, gain // 2, gain}):
        yield _rank_floor(items, rank, gain, share)


def _rank_floor(items: _Items, rank: int, gain: int, share: int) -> RankFloor:
    windows, problem = items.windows, items.windows.problem
    start = problem.dependencies.rank_start
    cells = np.arange(start[rank], start[rank + 1])
    forward, backward = cells[items.forward[cells]], cells[items.backward[cells]]
    capacity = None if problem.capacity is None else int(problem.capacity[rank])
    ours = np.flatnonzero((items.cell[0] >= start[rank]) & (items.cell[0] < start[rank + 1]))
    held, left = items.held[:, ours], items.left[:, ours]
    alone = ~items.backward[items.cell[0, ours]]
    time = problem.duration[items.cell[0, ours[alone]]]
    starts, first = int(windows.head[cells].min()), int(windows.head[backward].min())
    filled = most_work(held[0, alone], np.maximum(time - share, 0), capacity)
    if share:
        filled = min(filled, most_work(time, np.maximum(time - share, 0), first - starts))
    left[0] = np.maximum(left[0] - (gain - share), 0)
    pairs = ours.size if gain else 0
    return RankFloor(
        rank=rank,
        work=int(problem.duration[cells].sum()) - pairs * gain,
        starts=starts,
        ends=int(windows.tail[cells].min()),
        backward=first,
        filled=filled,
        rest=int(windows.tail[forward].min()),
        left=most_work(*steps_left(held, left), capacity, sizes=held.ravel()),
        apart=not alone.all() or (capacity is not None and int(held[0].sum()) > capacity),
        capacity=capacity,
        pairs=pairs,
        gain=gain,
        share=share,
    )


def steps_left(held: Int64, left: Int64) -> tuple[Int64, Int64]:
    """[steps] memory and work of the steps that fill a rank with items, each step a part of an item.

    held, left: [2, items] memory and work of an item before its backward, and what is left of both after it. An item
    without a W has none after it. What is left first, and then the backward, are two steps where the first gives more
    work for its memory than the second. Otherwise the item is one step. So the steps of an item have falling ratios.
    """
    (whole, pending), (backward, weight) = held, left
    more = whole - pending
    parted = (more > 0) & (weight * more >= backward * pending)
    memory = np.concatenate([np.where(parted, pending, whole), more[parted]])
    work = np.concatenate([np.where(parted, weight, backward + weight), backward[parted]])
    return memory, work


def most_work(memory: Int64, work: Int64, capacity: int | None, sizes: Int64 | None = None) -> int:
    """Upper bound of the work of parts that fit into the capacity together: the fractional knapsack's, rounded down.

    memory, work: [parts]. sizes: [n] all that a part may hold, where that is more than ``memory``. The capacity is
    first rounded down to a multiple of what divides all sizes, as sums of them are such multiples. For any
    price per memory, no selection works more than the price of the capacity and what each part works beyond its own
    price. The best price is the ratio of the part that no longer fits. All numbers are integers, so nothing is rounded.
    """
    if capacity is None or int(memory.sum()) <= capacity:
        return int(work.sum())
    unit = gcd(*(memory if sizes is None else sizes).tolist())
    room = capacity // unit * unit
    order = np.argsort(-work / np.maximum(memory, 0.5), kind="stable")
    last = order[np.searchsorted(np.cumsum(memory[order]), room, side="right")]
    per, price = int(memory[last]), int(work[last])
    if max(int(work.max()) * per, price * int(memory.max())) * work.size < 1 << 62:
        return (price * room + int(np.maximum(work * per - price * memory, 0).sum())) // per
    beyond = (max(0, value * per - price * size) for size, value in zip(memory.tolist(), work.tolist(), strict=True))
    bound: int = (price * room + sum(beyond)) // per
    return bound
