"""Orders ops by list scheduling: simulates the ranks, each of which starts one of its ready ops by a rule.

The next op of a rank depends on when other ranks finish. So this goes op by op, unlike the rest of elaboration. Only
computed orders need it. Equal inputs give equal orders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from schedc.elaborate.clock import CellRows, RankClock
from schedc.elaborate.ready_ops import PreferencePool
from schedc.elaborate.rules import Preferred
from schedc.elaborate.simulated_order import SimulatedOrder
from schedc.ir.schedule import Schedule
from schedc.step.op_times import OpTimes


def list_schedule(
    schedule: Schedule, computed: Sequence[bool], rule: Preferred | None, times: OpTimes
) -> SimulatedOrder:
    """Simulate a schedule: ops of the computed order start by ``rule``, the others in the order of the schedule.

    computed: [ops] whether an op belongs to the computed order. Those of a rank are consecutive.
    times: durations of ops, pairs and messages.
    """
    clock = RankClock(schedule, times)
    ranks = [_RankQueue(clock, rank, computed, rule) for rank in range(schedule.ranks)]
    free = [0.0] * schedule.ranks
    first = [0.0] * schedule.ranks
    cells: list[list[CellRows]] = [[] for _ in ranks]
    events = [(0.0, rank) for rank in range(schedule.ranks)]
    heapify(events)
    while events:
        now, rank = heappop(events)
        cell = ranks[rank].next(now) if free[rank] <= now else None
        if cell is None:
            continue  # an event follows when the rank is free, and one for each arrival
        first[rank] = first[rank] if cells[rank] else now
        cells[rank].append(cell)
        free[rank] = clock.start(cell, now)
        heappush(events, (free[rank], rank))
        for wake in clock.sent:
            heappush(events, wake)
    span = max((end - start for start, end in zip(first, free, strict=True)), default=0.0)
    complete = sum(map(len, (c for r in cells for c in r))) == len(schedule)
    return SimulatedOrder.of_cells(cells, max(free, default=0.0), span, complete)


class _RankQueue:
    """The ops that a rank has not started: those before its computed order, the computed order, and those after it."""

    def __init__(self, clock: RankClock, rank: int, computed: Sequence[bool], rule: Preferred | None) -> None:
        self.clock = clock
        start, stop = clock.schedule.rank_start[rank : rank + 2].tolist()
        pool = [row for row in range(start, stop) if computed[row]] if rule is not None else []
        edge = pool[0] if pool else stop
        self.before = deque(_cells(clock.schedule, start, edge))
        self.after = deque(_cells(clock.schedule, edge + len(pool), stop))
        self.pool = None if rule is None else PreferencePool(clock, rank, pool, rule)

    def next(self, now: float) -> CellRows | None:
        """Take the op or pair that the rank starts at time ``now``; None if it has to wait."""
        if not self.before and self.pool is not None and self.pool.left:
            cell = self.pool.choose(now)
        else:
            cells = self.before or self.after
            ready = bool(cells)
            for row in cells[0] if cells else ():
                ready = ready and self.clock.ready(row, now)
            cell = cells.popleft() if ready else None
        if cell is not None and self.pool is not None:
            self.pool.note(cell)
        return cell


def _cells(schedule: Schedule, start: int, stop: int) -> Iterator[CellRows]:
    """The ops and pairs in the rows from ``start`` to ``stop``, which are of one rank."""
    pair = schedule.pair[start:stop].tolist()
    row = start
    while row < stop:
        size = 1 + (row + 1 < stop and pair[row - start] >= 0 and pair[row - start] == pair[row - start + 1])
        yield tuple(range(row, row + size))
        row += size
