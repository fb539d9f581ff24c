"""Chooses the order in which ranks run ops: one loop over time, in which each free rank asks a rule for its next cell.

The next op of a rank depends on when other ranks finish. So this goes cell by cell. Equal inputs give equal orders. A
chosen order has no times: its timeline has them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple, Protocol

import numpy as np

from schedc.ir.arrays import Bools, Int64
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.schedule import Schedule
from schedc.step.dependencies import needs_of
from schedc.step.op_times import OpTimes
from schedc.step.rules import OpPattern, Preferred
from schedc.step.unequal import op_factors, pair_time

Cell = tuple[int, ...]
"""An op, or the two ops of a pair."""


class ChosenOrder(NamedTuple):
    """Ops in an order in which those of a rank come in the order of their start; all of them without a deadlock.

    rows: [ran] rows of the schedule. second: [ran] whether an op is the second one of a pair with the op before it.
    """

    rows: Int64
    second: Bools

    @classmethod
    def of_cells(cls, cells: Sequence[Cell]) -> ChosenOrder:
        rows = np.array([row for cell in cells for row in cell], np.int64)
        lengths = np.array([len(cell) for cell in cells], np.int64)
        second = np.ones(rows.size, bool)
        second[np.cumsum(lengths) - lengths] = False
        return cls(rows, second)

    def of(self, schedule: Schedule) -> Schedule:
        """The schedule with its ops, which are all in the order, in this order."""
        by_rank = np.argsort(schedule.rank[self.rows], kind="stable")
        rows, second = self.rows[by_rank], self.second[by_rank]
        first = np.append(second[1:], False)
        pair = np.where(first | second, np.cumsum(first) - 1, -1).astype(np.int32)
        columns = {name: getattr(schedule, name)[rows] for name in ("kind", "stage", "microbatch", "phase", "span")}
        return replace(schedule, pair=pair, **columns)


class Ops(NamedTuple):
    """Ops that ranks start, and their times in any unit.

    rank_start: [P + 1] the ops of each rank. time: how long a cell takes.
    after: [ops] the ops that wait for each, with the time that passes between. waits: [ops] for how many each waits.
    """

    rank_start: Sequence[int]
    time: Callable[[Cell], float]
    after: Sequence[Sequence[tuple[int, float]]]
    waits: Sequence[int]

    @classmethod
    def of(cls, schedule: Schedule, times: OpTimes) -> Ops:
        """The ops of a schedule. An op that needs a missing op waits for ever."""
        count, needs, rank = len(schedule), needs_of(schedule), schedule.rank
        kind, stage = schedule.kind.tolist(), schedule.stage.tolist()
        after: list[list[tuple[int, float]]] = [[] for _ in kind]
        for needed in needs:
            waiting = np.flatnonzero((needed >= 0) & (needed < count))
            lag = np.where(rank[needed[waiting]] != rank[waiting], times.p2p, 0.0)
            for before, op, late in zip(needed[waiting].tolist(), waiting.tolist(), lag.tolist(), strict=True):
                after[before].append((op, late))
        each, pair = np.array(times.alone)[schedule.kind, schedule.stage], cache(times.pair)
        alone, factor = each.tolist(), op_factors(times.factors, schedule).tolist()

        def time(cell: Cell) -> float:
            if len(cell) == 1:
                return float(factor[cell[0]] * alone[cell[0]])
            first, second = cell
            one, two = factor[first], factor[second]
            whole = pair(LETTERS[kind[first]] + LETTERS[kind[second]], stage[first], stage[second])
            return float(pair_time(one, two, min(one, two), whole, alone[first], alone[second]))

        return cls(schedule.rank_start.tolist(), time, after, (needs >= 0).sum(axis=0).tolist())


class RankQueue(Protocol):
    """The ops that a rank has not started."""

    def take(self, now: float) -> Cell | None:
        """Takes the cell that the free rank starts at time ``now``, in the unit of the ops; None if it waits."""


class ChoiceRule(Protocol):
    """How every rank chooses its next cell."""

    def queue(self, rank: int, ops: Ops, due: Sequence[float]) -> RankQueue:
        """The ops of a rank. due: [ops] when all that an op waits for is there; inf as long as that is unknown."""


def choose(ops: Ops, rule: ChoiceRule) -> ChosenOrder:
    """The order in which ranks start ops by a rule: time and rank ascend. It lacks ops if all ranks come to wait."""
    ranks, after = range(len(ops.rank_start) - 1), ops.after
    rank_of = [rank for rank in ranks for _ in range(ops.rank_start[rank], ops.rank_start[rank + 1])]
    waits, arrival = list(ops.waits), [0.0] * len(ops.waits)
    due = [inf if count else 0.0 for count in waits]
    queues, free = [rule.queue(rank, ops, due) for rank in ranks], [0.0] * len(ranks)
    cells: list[Cell] = []
    events = [(0.0, rank) for rank in ranks]
    heapify(events)
    while events:
        now, rank = heappop(events)
        cell = queues[rank].take(now) if free[rank] <= now else None
        if cell is None:
            continue  # an event follows when the rank is free, and one when an op becomes ready
        cells.append(cell)
        end = free[rank] = now + ops.time(cell)
        heappush(events, (end, rank))
        for op in cell:
            for other, lag in after[op]:
                there = end + lag
                if there > arrival[other]:
                    arrival[other] = there
                waits[other] -= 1
                if not waits[other]:
                    due[other] = there = arrival[other]
                    if there > end or rank_of[other] != rank:
                        heappush(events, (there, rank_of[other]))
    return ChosenOrder.of_cells(cells)


# Orders of a text.


@dataclass(frozen=True)
class Preferring:
    """Ops run in the order of the text, except for those of a computed order, which run by a rule.

    computed: [ops] whether an op belongs to the computed order. Those of a rank are consecutive.
    """

    schedule: Schedule
    computed: Sequence[bool]
    preferred: Preferred

    def queue(self, rank: int, ops: Ops, due: Sequence[float]) -> RankQueue:
        start, stop = ops.rank_start[rank], ops.rank_start[rank + 1]
        pool = [row for row in range(start, stop) if self.computed[row]]
        edge = pool[0] if pool else stop
        preferences = _Preferences(self, rank, pool, ops, due)
        if len(pool) == stop - start:
            return preferences
        before, after = _cells(self.schedule, start, edge), _cells(self.schedule, edge + len(pool), stop)
        return _TextQueue(deque(before), preferences, deque(after), due)


def _cells(schedule: Schedule, start: int, stop: int) -> Iterator[Cell]:
    """The ops and pairs in the rows from ``start`` to ``stop``, which are of one rank."""
    pair = schedule.pair[start:stop].tolist()
    row = start
    while row < stop:
        size = 1 + (row + 1 < stop and pair[row - start] >= 0 and pair[row - start] == pair[row - start + 1])
        yield tuple(range(row, row + size))
        row += size


@dataclass(frozen=True)
class _TextQueue:
    """The ops that a rank has not started: before the computed order, in the order, and after the order."""

    before: deque[Cell]
    pool: _Preferences
    after: deque[Cell]
    due: Sequence[float]

    def take(self, now: float) -> Cell | None:
        if not self.before and self.pool.left:
            return self.pool.take(now)
        cells = self.before or self.after
        if not cells or any(self.due[row] > now for row in cells[0]):
            return None
        self.pool.count(cells[0])
        return cells.popleft()


class _Preferences:
    """The ops of a rank's computed order that have not run, by the rule `Preferred`. left: their number.

    Ops of one kind and stage, the key, run in the order of the text.
    """

    def __init__(self, text: Preferring, rank: int, rows: list[int], ops: Ops, due: Sequence[float]) -> None:
        rule, schedule = text.preferred, text.schedule
        self.time, self.due, self.left = ops.time, due, len(rows)
        self.start, stop = ops.rank_start[rank], ops.rank_start[rank + 1]
        keys = schedule.kind * np.int64(schedule.stages) + schedule.stage
        self.keys: list[int] = keys[self.start : stop].tolist()
        self.queues: dict[int, list[int]] = {}
        for row in rows:
            self.queues.setdefault(self.keys[row - self.start], []).append(row)
        self.head = dict.fromkeys(self.queues, 0)
        stages = schedule.placement.stage_of_chunk[rank].tolist()

        def matching(pattern: OpPattern | None) -> list[int]:
            if pattern is None:
                return []
            chosen = stages if pattern.chunk is None else [stages[pattern.chunk[rank]]]
            keys = [pattern.kind * schedule.stages + stage for stage in chosen if stage >= 0]
            return [key for key in keys if key in self.queues]

        self.preferences = [[matching(pattern) for pattern in patterns] for patterns in rule.preferences]
        self.fillers = [key for key in self.queues if rule.fill and key // schedule.stages == OpKind.W]
        self.others = [key for key in self.queues if key not in self.fillers]
        self.preferences.append([self.others])
        self.started = [0] * len(rule.limits)
        self.limits: dict[int, list[tuple[int, list[int], int]]] = {key: [] for key in self.queues}
        self.changes: dict[int, list[tuple[int, int]]] = {key: [] for key in self.queues}
        for number, limit in enumerate(rule.limits):
            counted, freed = matching(limit.counted), matching(limit.freed)
            for key in self.queues:
                self.changes[key].append((number, (key in counted) - (key in freed)))
            for key in set(counted):
                self.limits[key].append((number, [*set(counted)], limit.most[rank]))

    def take(self, now: float) -> Cell | None:
        for keys_of_ops in self.preferences:
            cell: Cell = ()
            for keys in keys_of_ops:
                if (row := self._first(keys, now)) is None:
                    break
                cell = (*cell, row)
            else:
                return self._taken(cell)
        filler = self._first(self.fillers, now)
        if filler is None or self._soonest() < now + self.time((filler,)):
            return None
        return self._taken((filler,))

    def _taken(self, cell: Cell) -> Cell:
        for row in cell:
            self.head[self.keys[row - self.start]] += 1
        self.left -= len(cell)
        self.count(cell)
        return cell

    def count(self, cell: Cell) -> None:
        """Count a cell of the rank that starts, whether of the computed order or not."""
        for row in cell:
            for number, change in self.changes.get(self.keys[row - self.start], ()):
                self.started[number] += change

    def _soonest(self) -> float:
        """The earliest time at which an op within the limits is ready that is no filler; inf if none is known."""
        heads = [self.queues[key][self.head[key]] for key in self.others if self.head[key] < len(self.queues[key])]
        return min((self.due[row] for row in heads if self._within(row)), default=inf)

    def _first(self, keys: list[int], now: float) -> int | None:
        """The first row in the text with one of these keys that may run at time ``now``."""
        first = None
        for key in keys:
            queue, head = self.queues[key], self.head[key]
            if head == len(queue) or self.due[row := queue[head]] > now or (first is not None and row > first):
                continue
            if self._within(row):
                first = row
        return first

    def _within(self, row: int) -> bool:
        """Whether an op may start under every limit. Counted ops before it in the text that have not run count too."""
        for number, counted, most in self.limits[self.keys[row - self.start]]:
            count = self.started[number]
            for key in counted:
                head = self.head[key]
                count += bisect_left(self.queues[key], row, head) - head
            if count >= most:
                return False
        return True


# Orders by priority.


@dataclass(frozen=True)
class ByPriority:
    """Every free rank starts its ready op of least priority that fits into its memory.

    priority: [ops]. queue: [ops] ops of a rank with the same number start in their order.
    takes, gives: [ops] memory taken at the start of an op, and freed at its end. promises: [ops] by how much an op
    changes what its rank reserves for ops that will follow. room: [P] memory of each rank; None for no limit.
    """

    priority: Sequence[tuple[int, ...]]
    queues: Sequence[int]
    takes: Sequence[int]
    gives: Sequence[int]
    promises: Sequence[int]
    room: Sequence[int] | None

    def queue(self, rank: int, ops: Ops, due: Sequence[float]) -> RankQueue:
        return _PriorityQueue(self, rank, ops, due)


class _PriorityQueue:
    """The ops of a rank that have not started. used: memory held, and reserved for what will follow."""

    def __init__(self, rule: ByPriority, rank: int, ops: Ops, due: Sequence[float]) -> None:
        self.rule, self.due, self.used = rule, due, 0
        self.room = None if rule.room is None else rule.room[rank]
        self.queues: dict[int, deque[int]] = {}
        for op in range(ops.rank_start[rank], ops.rank_start[rank + 1]):
            self.queues.setdefault(rule.queues[op], deque()).append(op)

    def take(self, now: float) -> Cell | None:
        heads = (queue[0] for queue in self.queues.values() if queue)
        ready = [(self.rule.priority[op], op) for op in heads if self.due[op] <= now and self._fits(op)]
        if not ready:
            return None
        _, op = min(ready)
        self.queues[self.rule.queues[op]].popleft()
        self.used += self.rule.takes[op] + self.rule.promises[op] - self.rule.gives[op]
        return (op,)

    def _fits(self, op: int) -> bool:
        needed = self.rule.takes[op]
        return self.room is None or not needed or self.used + needed + self.rule.promises[op] <= self.room
