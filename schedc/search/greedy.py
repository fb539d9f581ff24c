"""Makes orders without search: list schedules within the cap, and one microbatch after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from schedc.ir.arrays import bincount
from schedc.ir.ops import OpKind
from schedc.search.bounds import Arcs, Windows
from schedc.search.problem import SearchProblem

Order = list[int]
"""[cells] all cells of a problem, each after those that it depends on. The cells of a rank run in this order."""


def serial_order(problem: SearchProblem, arcs: Arcs) -> Order:
    """One microbatch after another, as far as the arcs allow, with each weight gradient as early as possible.

    If microbatches do not depend on each other (no pairs, one sequence), no order needs less memory on any rank.
    The reason: a microbatch runs its forwards through all chunks of a rank before its first backward there.
    """
    schedule, first = problem.schedule, problem.dependencies.first
    second = np.maximum(problem.dependencies.second, first)
    microbatch = np.minimum(schedule.microbatch[first], schedule.microbatch[second])
    forward = schedule.kind[second] == OpKind.F
    weight = schedule.kind[first] == OpKind.W
    return arcs.sorted(list(zip(microbatch.tolist(), forward.tolist(), (~weight).tolist(), strict=True)))


def list_orders(problem: SearchProblem, windows: Windows, position: list[int]) -> Iterator[Order]:
    """List schedules under different priorities. Those that deadlock are left out.

    position: [cells] position in the seed, or in another order, which some of the priorities follow.
    """
    kind, dependencies = problem.schedule.kind, problem.dependencies
    weight = (kind[dependencies.first] == OpKind.W).tolist()
    backward = (kind[np.maximum(dependencies.second, dependencies.first)] != OpKind.F).tolist()
    tail = windows.tail.tolist()
    priorities: tuple[list[tuple[int, ...]], ...] = (
        [(w, -t) for w, t in zip(weight, tail, strict=True)],
        [(w, not b, -t) for w, b, t in zip(weight, backward, tail, strict=True)],
        [(p,) for p in position],
        [(w, p) for w, p in zip(weight, position, strict=True)],
    )
    for priority in priorities:
        for reserve in (True, False) if problem.capacity is not None else (False,):
            order = _ListRun(problem, windows.arcs, priority, reserve).run()
            if len(order) == len(problem):
                yield order


@dataclass
class _GreedyRank:
    """The state of a rank. now: ticks at which it is free. ready: cells whose inputs have arrived, by priority.

    held, promised: memory in use, and memory reserved for microbatches that have begun.
    """

    now: int
    ready: list[tuple[tuple[int, ...], int]]
    held: int = 0
    promised: int = 0


class _ListRun:
    """A simulation in which every free rank starts its ready cell of least priority that fits into its memory.

    reserve: the first cell of a microbatch on a rank needs room for all memory that the microbatch will hold there.
        So a microbatch that has begun can end. Without it, a cell needs room only for itself, and the run may deadlock.
    """

    def __init__(self, problem: SearchProblem, arcs: Arcs, priority: list[tuple[int, ...]], reserve: bool) -> None:
        self.problem, self.arcs, self.priority = problem, arcs, priority
        self.duration = problem.duration.tolist()
        self.rank_of = problem.dependencies.rank.tolist()
        self.room = None if problem.capacity is None else problem.capacity.tolist()
        self.ranks = [_GreedyRank(0, []) for _ in range(problem.dependencies.rank_start.size - 1)]
        self.takes, self.gives = _changes(problem)
        self.promises, self.keeps = _promises(problem) if reserve else ([0] * len(problem), [0] * len(problem))

    def run(self) -> Order:
        """The order of the simulation, shorter than the number of cells if it deadlocks."""
        missing = [len(before) for before in self.arcs.followed]
        arrival = [0] * len(missing)
        events: list[tuple[int, int, int, int]] = []  # time, what (0 a cell ends, 1 is ready, 2 choose), rank, cell
        for cell, count in enumerate(missing):
            if not count:
                events.append((0, 1, self.rank_of[cell], cell))
        heapify(events)
        order: Order = []
        while events:
            time, what, number, cell = heappop(events)
            rank = self.ranks[number]
            if what == 0:
                rank.held -= self.gives[cell]
            elif what == 1:
                heappush(rank.ready, (self.priority[cell], cell))
            if what < 2:
                heappush(events, (time, 2, number, -1))
                continue
            chosen = self._choose(rank, number) if rank.now <= time else -1
            if chosen < 0:
                continue
            order.append(chosen)
            rank.now = time + self.duration[chosen]
            heappush(events, (rank.now, 0, number, chosen))
            for after, lag in self.arcs.following[chosen]:
                arrival[after] = max(arrival[after], rank.now + lag)
                missing[after] -= 1
                if not missing[after]:
                    heappush(events, (arrival[after], 1, self.rank_of[after], after))
        return order

    def _choose(self, rank: _GreedyRank, number: int) -> int:
        """Take the ready cell of least priority that fits; -1 if no ready cell fits."""
        skipped = []
        chosen = -1
        while rank.ready and chosen < 0:
            entry = heappop(rank.ready)
            cell = entry[1]
            if self._fits(rank, number, cell):
                chosen = cell
            else:
                skipped.append(entry)
        for entry in skipped:
            heappush(rank.ready, entry)
        if chosen >= 0:
            rank.held += self.takes[chosen]
            rank.promised += self.promises[chosen] - self.keeps[chosen]
        return chosen

    def _fits(self, rank: _GreedyRank, number: int, cell: int) -> bool:
        if self.room is None or not self.takes[cell]:
            return True
        promise = rank.promised + self.promises[cell] - self.keeps[cell]
        return bool(rank.held + self.takes[cell] + promise <= self.room[number])


def _changes(problem: SearchProblem) -> tuple[list[int], list[int]]:
    """[cells] memory taken at the start of a cell; [cells] memory freed at its end, less that of a pending weight."""
    takes, gives = np.zeros(len(problem), np.int64), np.zeros(len(problem), np.int64)
    holds = problem.holds
    np.add.at(takes, holds.taken[~holds.late], holds.amount[~holds.late])
    np.add.at(gives, holds.taken[holds.late], -holds.amount[holds.late])
    np.add.at(gives, holds.freed, holds.amount)
    return takes.tolist(), gives.tolist()


def _promises(problem: SearchProblem) -> tuple[list[int], list[int]]:
    """[cells] memory that a microbatch's first forward on a rank reserves for its other chunks there; [cells] the part
    of it that each later forward uses. Pending weights larger than activations are not counted."""
    schedule, dependencies = problem.schedule, problem.dependencies
    takes = np.array(_changes(problem)[0])
    cells = np.flatnonzero(takes > 0)
    row = dependencies.first[cells]
    key = schedule.rank[row].astype(np.int64) * schedule.microbatches + schedule.microbatch[row]
    order = np.lexsort((schedule.stage[row], key))
    cells, key = cells[order], key[order]
    first = np.append(True, key[1:] != key[:-1]) if key.size else np.zeros(0, bool)
    group = np.cumsum(first) - 1
    total = bincount(group, takes[cells]).astype(np.int64)
    promises, keeps = np.zeros(len(problem), np.int64), np.zeros(len(problem), np.int64)
    promises[cells[first]] = (total - takes[cells[first]])[: int(first.sum())]
    keeps[cells[~first]] = takes[cells[~first]]
    return promises.tolist(), keeps.tolist()
