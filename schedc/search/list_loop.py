"""Makes list schedules by the thousand: one loop over whole ticks, compiled by numba where it is installed.

A rank has queues of cells that keep their sequence. Whenever it is free, it starts the ready head of least priority
that fits into its memory. Reversed in time, the loop runs the same problem from its end. With one queue per rank it
prices a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedc.ir.arrays import Int64
from schedc.ir.compiled import called_from_loops, compile_seconds, jit

_COMPILE_SECONDS = 6.0
"""What compiling the loop costs, once on a machine."""

FAR = 1 << 60
"""Ticks, and a memory, beyond all that occur."""

RESERVES = 3
"""Ways to keep room for what has begun: none, the rest of the oldest microbatch, the rest of all older ones."""


class ListOps(NamedTuple):
    """Cells of a problem in queues. Times are in ticks, memory in ticks of its grid.

    rank_queue: [P + 1] queues of each rank. queue_start: [queues + 1], queue_cell: [cells] the cells of each queue.
    duration: [cells]. first: [cells + 1], needs, lag: [arcs] the cells that a cell starts after, and how long after.
    takes, gives: [cells] memory taken at a start and freed at an end. filler: [cells] 1 for a W alone.
    room: [P] memory of each rank; `FAR` without a cap.
    """

    rank_queue: Any
    queue_start: Any
    queue_cell: Any
    duration: Any
    first: Any
    needs: Any
    lag: Any
    takes: Any
    gives: Any
    filler: Any
    room: Any


class ListState(NamedTuple):
    """What the loop changes. start: [cells] ticks, -1 before. head: [queues]. free, used: [P] time and memory."""

    start: Any
    head: Any
    free: Any
    used: Any


def run_list_schedule(ops: ListOps, state: ListState, priority: Any, reserve: int, patient: int) -> int:
    """Fills ``state.start`` and gives the makespan; -1 if all ranks come to wait.

    reserve: a way of `RESERVES`. patient: 1 if a rank waits instead of a W when another cell is ready before its end.
    """
    now, makespan, left = 0, 0, len(ops.duration)
    while now < FAR and left:
        later = FAR
        for rank in range(len(state.free)):
            if state.free[rank] > now:
                later = min(later, state.free[rank])
                continue
            queue, soon = next_queue(ops, state, priority, reserve, patient, rank, now)
            if queue < 0:
                later = min(later, soon)
                continue
            cell = ops.queue_cell[state.head[queue]]
            state.head[queue] += 1
            state.start[cell] = now
            state.used[rank] += ops.takes[cell] - ops.gives[cell]
            state.free[rank] = now + ops.duration[cell]
            makespan = max(makespan, state.free[rank])
            later = min(later, state.free[rank])
            left -= 1
        now = later
    return -1 if left else makespan


def next_queue(
    ops: ListOps, state: ListState, priority: Any, reserve: int, patient: int, rank: int, now: int
) -> tuple[int, int]:
    """The queue whose head the free rank starts, -1 if it waits; and when the next head is ready, as far as known."""
    chosen, least, soon, later = -1, FAR, FAR, FAR
    for queue in range(ops.rank_queue[rank], ops.rank_queue[rank + 1]):
        if state.head[queue] == ops.queue_start[queue + 1]:
            continue
        cell = ops.queue_cell[state.head[queue]]
        ready = ready_time(ops, state, cell)
        if ready > now:
            later = min(later, ready)
            if not ops.filler[cell]:
                soon = min(soon, ready)
        elif priority[cell] < least and has_room(ops, state, reserve, rank, queue):
            chosen, least = queue, priority[cell]
    if chosen >= 0 and patient:
        cell = ops.queue_cell[state.head[chosen]]
        if ops.filler[cell] and soon < now + ops.duration[cell]:
            return -1, soon
    return chosen, later


def ready_time(ops: ListOps, state: ListState, cell: int) -> int:
    """Scalar, in ticks: when all that a cell starts after is there; `FAR` while that is not known."""
    ready = 0
    for arc in range(ops.first[cell], ops.first[cell + 1]):
        start = state.start[ops.needs[arc]]
        if start < 0:
            return FAR
        ready = max(ready, start + ops.duration[ops.needs[arc]] + ops.lag[arc])
    return ready


def has_room(ops: ListOps, state: ListState, reserve: int, rank: int, queue: int) -> bool:
    """Whether the head of a queue fits into the rank's memory beside what is reserved.

    A queue whose place is behind this one's belongs to older microbatches, which still have to take memory.
    """
    cell = ops.queue_cell[state.head[queue]]
    if ops.takes[cell] <= 0 or state.used[rank] + ops.takes[cell] > ops.room[rank]:
        return bool(ops.takes[cell] <= 0)
    place, behind, oldest, older = state.head[queue] - ops.queue_start[queue], 0, 0, 0
    for other in range(ops.rank_queue[rank], ops.rank_queue[rank + 1]):
        if reserve == 0 or state.head[other] == ops.queue_start[other + 1]:
            continue
        amount = ops.takes[ops.queue_cell[state.head[other]]]
        gap = place - (state.head[other] - ops.queue_start[other])
        if amount <= 0 or gap <= 0 or gap < behind:
            older += max(0, gap) * max(0, amount)
            continue
        oldest = amount + (oldest if gap == behind else 0)
        behind = gap
        older += gap * amount
    return bool(state.used[rank] + ops.takes[cell] + (oldest if reserve == 1 else older) <= ops.room[rank])


@dataclass(frozen=True, eq=False)
class ListRunner:
    """The loop, compiled or not, and the problem as it takes it. ops: arrays or lists."""

    ops: ListOps
    loop: Callable[..., int]
    compiled: bool

    @classmethod
    def of(cls, ops: ListOps, compiled: bool) -> ListRunner:
        """compiled: whether to compile the loop. numba must be there."""
        loops = jit() if compiled else None
        if loops is None:
            return cls(ListOps(*(np.asarray(column).tolist() for column in ops)), run_list_schedule, False)
        for function in (ready_time, has_room, next_queue):
            called_from_loops(function)
        return cls(ops, loops(run_list_schedule), True)

    def replaced(self, **columns: Int64) -> ListRunner:
        """The same loop over ops of which some columns differ. columns: shapes as in `ListOps`."""
        kept = columns if self.compiled else {name: column.tolist() for name, column in columns.items()}
        return ListRunner(self.ops._replace(**kept), self.loop, self.compiled)

    def __call__(self, priority: Int64, reserve: int = 0, patient: int = 0) -> tuple[int, Int64]:
        """The makespan in ticks, -1 for a deadlock, and [cells] the starts. priority: [cells]; the least is first."""
        heads = np.array(self.ops.queue_start[:-1], np.int64)
        ranks = len(self.ops.room)
        state = ListState(np.full(priority.size, -1), heads, np.zeros(ranks, np.int64), np.zeros(ranks, np.int64))
        if self.compiled:
            return int(self.loop(self.ops, state, priority, reserve, patient)), state.start
        lists = ListState(*(column.tolist() for column in state))
        makespan = self.loop(self.ops, lists, priority.tolist(), reserve, patient)
        return makespan, np.array(lists.start, np.int64)


def seconds_to_compile() -> float:
    """Scalar, in seconds: what compiling the loop still costs on this machine."""
    return compile_seconds(Path(__file__), _COMPILE_SECONDS)
