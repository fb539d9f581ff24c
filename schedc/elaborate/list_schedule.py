"""Deterministic list scheduling: runs a schedule under given costs, ranks choosing among the ops that are ready.

What a rank does next depends on when the others finish, so that this goes op by op, unlike the rest of elaboration;
only computed orders pay for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from schedc.cost.costs import Costs
from schedc.elaborate.clock import CellRows, RankClock
from schedc.elaborate.ready_ops import InTurnPool, OpPool, PreferencePool
from schedc.elaborate.rules import InTurn, Preferred, Rule
from schedc.ir.schedule import Schedule


@dataclass(frozen=True)
class SimulatedOrder:
    """The cells of each rank as they ran, the time, and whether all of them could run.

    span: the longest time from a rank's first op to the end of its last.
    """

    cells: list[list[CellRows]]
    makespan: float
    span: float
    complete: bool


def list_schedule(schedule: Schedule, computed: Sequence[bool], rule: Rule | None, costs: Costs) -> SimulatedOrder:
    """Run a schedule whose ``computed`` rows ([ops]) go by ``rule`` and whose others run as written.

    The computed rows of a rank are consecutive. Times are those of ``costs``; a `timed` block has unit slots.
    """
    clock = RankClock(schedule, Costs() if isinstance(rule, InTurn) else costs)
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
            continue  # the rank is woken again when it is free, and when something arrives
        first[rank] = first[rank] if cells[rank] else now
        cells[rank].append(cell)
        free[rank] = clock.start(cell, rank, now)
        heappush(events, (free[rank], rank))
        for wake in clock.sent:
            heappush(events, wake)
    span = max((end - start for start, end in zip(first, free, strict=True)), default=0.0)
    complete = sum(map(len, (c for r in cells for c in r))) == len(schedule)
    return SimulatedOrder(cells, max(free, default=0.0), span, complete)


def in_run_order(schedule: Schedule, ran: SimulatedOrder) -> Schedule:
    """The schedule in the order in which it ran."""
    cells = [cell for rank in ran.cells for cell in rank]
    rows = np.array([row for cell in cells for row in cell], np.int64)
    numbers = [number if len(cell) > 1 else -1 for number, cell in enumerate(cells) for _ in cell]
    pair = np.array(numbers, np.int32)
    pair[pair >= 0] = np.unique(pair[pair >= 0], return_inverse=True)[1]
    columns = {name: getattr(schedule, name)[rows] for name in ("kind", "stage", "microbatch", "phase", "span")}
    return replace(schedule, pair=pair, **columns)


class _RankQueue:
    """What a rank has still to do: cells before the computed order, that, and cells after it."""

    def __init__(self, clock: RankClock, rank: int, computed: Sequence[bool], rule: Rule | None) -> None:
        self.clock = clock
        start, stop = clock.schedule.rank_start[rank : rank + 2].tolist()
        pool = [row for row in range(start, stop) if computed[row]] if rule is not None else []
        edge = pool[0] if pool else stop
        self.before = deque(_cells(clock.schedule, start, edge))
        self.after = deque(_cells(clock.schedule, edge + len(pool), stop))
        self.pool: OpPool | None = None
        if isinstance(rule, InTurn):
            self.pool = InTurnPool(clock, rank, pool, rule)
        if isinstance(rule, Preferred):
            self.pool = PreferencePool(clock, rank, pool, rule)

    def next(self, now: float) -> CellRows | None:
        """The cell that the rank starts now; None if it has to wait."""
        if not self.before and self.pool is not None and self.pool.left:
            cell = self.pool.choose(now)
        else:
            cells = self.before or self.after
            ready = cells and all(self.clock.ready(row, now) for row in cells[0])
            cell = cells.popleft() if ready else None
        if cell is not None and self.pool is not None:
            self.pool.note(cell)
        return cell


def _cells(schedule: Schedule, start: int, stop: int) -> Iterator[CellRows]:
    """The cells of consecutive rows of one rank."""
    pair = schedule.pair[start:stop].tolist()
    row = start
    while row < stop:
        size = 1 + (row + 1 < stop and pair[row - start] >= 0 and pair[row - start] == pair[row - start + 1])
        yield tuple(range(row, row + size))
        row += size
