"""List scheduling: tasks on one compute lane and the queues of exchanges, each taking what a rule gives it."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schedc.cell.graph import QUEUES, Lane
from schedc.cell.tasks import Tasks

Placed = list[tuple[int, float, float]]
"""Tasks with start and end, in the order in which they were chosen."""


COMPUTE = QUEUES.index(Lane.COMPUTE)


class LaneClock:
    """The queues at one time.

    lane: [tasks] number of its queue in `QUEUES`; missing: [tasks] how many tasks each still waits for.
    """

    def __init__(self, tasks: Tasks, duration: Sequence[float]) -> None:
        self.tasks, self.duration = tasks, duration
        self.now = 0.0
        self.lane, self._chained = tasks.queues, tasks.chained
        self.missing = list(tasks.needs)
        self.ready: tuple[list[int], ...] = tuple([] for _ in QUEUES)
        self.free = [0.0] * len(QUEUES)
        self.running: list[tuple[float, int]] = []
        self.placed: Placed = []
        for at, count in enumerate(self.missing):
            if not count:
                self.ready[self.lane[at]].append(at)

    def run(self, rule: Rule) -> Placed:
        """Until nothing runs; fewer tasks than there are if the rule takes none of those that are left."""
        while True:
            taken = False
            for lane, ready in enumerate(self.ready):
                if ready and self.free[lane] <= self.now:
                    taken |= self._take(lane, ready, rule)
            if not self.running:
                return self.placed
            if not taken or self.running[0][0] <= self.now:
                self._advance()

    def _take(self, lane: int, ready: list[int], rule: Rule) -> bool:
        """An exchange that needs another one directly is only started where compute is between two segments."""
        able = ready
        if self._chained and self.free[COMPUTE] > self.now:
            able = [at for at in ready if at not in self._chained]
        chosen = rule(self, able) if able else None
        if chosen is None:
            return False
        ready.remove(chosen)
        self.free[lane] = self.now + self.duration[chosen]
        self.placed.append((chosen, self.now, self.free[lane]))
        insort(self.running, (self.free[lane], chosen))
        return True

    def _advance(self) -> None:
        """To the next end, and what waited for the tasks that have ended becomes ready."""
        self.now = max(self.now, self.running[0][0])
        while self.running and self.running[0][0] <= self.now:
            for follower in self.tasks.followers[self.running.pop(0)[1]]:
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self.ready[self.lane[follower]].append(follower)


Rule = Callable[[LaneClock, list[int]], int | None]
"""What a free lane takes of the tasks that are ready for it, if any."""


MANNERS = ((math.inf, 0.0), (math.inf, 1.0), (0.5, 1.0), (0.2, 0.0), (0.0, 1.0))
"""Patience and courtesy of a `Priority` that are tried."""


@dataclass(frozen=True)
class Priority:
    """The task with the highest priority, unless it would keep its lane from a higher one that comes meanwhile.

    patience: how long such a task may have to wait, as a share of the time of the one that is taken; with infinite
        patience a free lane always takes a task. courtesy: the same for exchanges, of how long the lane would be left
        free: short ones, as the counts before a dispatch, need not queue behind long ones then.
    """

    priority: Sequence[float]
    patience: float
    courtesy: float

    def __call__(self, machine: LaneClock, ready: list[int]) -> int | None:
        if len(ready) == 1:
            return ready[0] if self._may_take(machine, ready[0]) else None
        order = sorted(ready, key=lambda at: (-self.priority[at], at))
        return next((at for at in order if self._may_take(machine, at)), None)

    def _may_take(self, machine: LaneClock, at: int) -> bool:
        coming = self._coming(machine, at)
        if coming is None:
            return True
        if machine.lane[at] != COMPUTE:
            return coming - machine.now > self.courtesy * machine.duration[at]
        return machine.now + machine.duration[at] - coming <= self.patience * machine.duration[at]

    def _coming(self, machine: LaneClock, at: int) -> float | None:
        """When, while this task would run, what runs now makes one of higher priority ready for the same lane."""
        end, lane, priority = machine.now + machine.duration[at], machine.lane[at], self.priority[at]
        for ready_at, running in machine.running:
            if ready_at >= end:
                break
            for follower in machine.tasks.followers[running]:
                if (
                    self.priority[follower] > priority
                    and machine.missing[follower] == 1
                    and machine.lane[follower] == lane
                ):
                    return ready_at
        return None
