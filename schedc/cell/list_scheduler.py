"""List scheduling of tasks on one compute lane and the queues of exchanges: a rule picks the next task of each."""

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
    """The state of all queues at one time, in the unit of ``duration``.

    lane: [tasks] index of each task's queue in `QUEUES`. missing: [tasks] number of dependencies not yet complete.
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
        for index, count in enumerate(self.missing):
            if not count:
                self.ready[self.lane[index]].append(index)

    def run(self, rule: Rule) -> Placed:
        """Runs until nothing can run. Returns fewer than all tasks if the rule takes none of those that are left."""
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
        """Starts what the rule picks. An exchange that depends directly on another starts only between two segments."""
        startable = ready
        if self._chained and self.free[COMPUTE] > self.now:
            startable = [index for index in ready if index not in self._chained]
        chosen = rule(self, startable) if startable else None
        if chosen is None:
            return False
        ready.remove(chosen)
        self.free[lane] = self.now + self.duration[chosen]
        self.placed.append((chosen, self.now, self.free[lane]))
        insort(self.running, (self.free[lane], chosen))
        return True

    def _advance(self) -> None:
        """Moves the clock to the next end; tasks whose last dependency has ended become ready."""
        self.now = max(self.now, self.running[0][0])
        while self.running and self.running[0][0] <= self.now:
            for follower in self.tasks.followers[self.running.pop(0)[1]]:
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self.ready[self.lane[follower]].append(follower)


Rule = Callable[[LaneClock, list[int]], int | None]
"""Picks the task that a free lane runs next, among those that are ready for it, or None."""


MANNERS = ((math.inf, 0.0), (math.inf, 1.0), (0.5, 1.0), (0.2, 0.0), (0.0, 1.0))
"""Patience and courtesy of the `Priority` rules that are tried."""


@dataclass(frozen=True)
class Priority:
    """Picks the task with the highest priority, unless it would delay one of higher priority that becomes ready soon.

    patience: longest delay of that other task, as a share of the picked task's time. With infinite patience a free
        lane always takes a task.
    courtesy: for exchanges, the longest time that a lane is left idle for the other, as a share of the picked one's
        time. Then short exchanges, such as the counts before a dispatch, do not queue behind long ones.
    """

    priority: Sequence[float]
    patience: float
    courtesy: float

    def __call__(self, machine: LaneClock, ready: list[int]) -> int | None:
        if len(ready) == 1:
            return ready[0] if self._may_take(machine, ready[0]) else None
        order = sorted(ready, key=lambda index: (-self.priority[index], index))
        return next((index for index in order if self._may_take(machine, index)), None)

    def _may_take(self, machine: LaneClock, index: int) -> bool:
        coming = self._coming(machine, index)
        if coming is None:
            return True
        if machine.lane[index] != COMPUTE:
            return coming - machine.now > self.courtesy * machine.duration[index]
        return machine.now + machine.duration[index] - coming <= self.patience * machine.duration[index]

    def _coming(self, machine: LaneClock, index: int) -> float | None:
        """When, during this task, a task of higher priority becomes ready for the same lane; None if none does."""
        end, lane, priority = machine.now + machine.duration[index], machine.lane[index], self.priority[index]
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
