"""List scheduling: tasks on one compute lane and two exchange lanes, each lane taking what a rule gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schedc.cell.graph import EXCHANGE_LANES, Lane
from schedc.cell.tasks import Tasks

Placed = list[tuple[int, float, float]]
"""Tasks with start and end, in the order in which they were chosen."""

LANES = (*EXCHANGE_LANES, Lane.COMPUTE)


class Machine:
    """The lanes at one time. ``missing``: [tasks] how many tasks each still waits for."""

    def __init__(self, tasks: Tasks, duration: Sequence[float]) -> None:
        self.tasks, self.duration = tasks, duration
        self.now = 0.0
        self.missing = [len(task.after) for task in tasks.all]
        self.ready: dict[Lane, list[int]] = {lane: [] for lane in LANES}
        self.free = dict.fromkeys(LANES, 0.0)
        self.running: list[tuple[float, int]] = []
        self.placed: Placed = []
        self._chained = [
            task.exchange and any(tasks.all[before].exchange for before in task.after) for task in tasks.all
        ]
        for at, count in enumerate(self.missing):
            if not count:
                self.ready[tasks.all[at].lane].append(at)

    def run(self, rule: Rule) -> Placed:
        """Until nothing runs; fewer tasks than there are if the rule takes none of those that are left."""
        while True:
            taken = [lane for lane in LANES if self.free[lane] <= self.now and self._take(lane, rule)]
            if not self.running:
                return self.placed
            if not taken or self.running[0][0] <= self.now:
                self._advance()

    def _take(self, lane: Lane, rule: Rule) -> bool:
        """An exchange that needs another one directly is only started where compute is between two segments."""
        between = self.free[Lane.COMPUTE] <= self.now
        able = [at for at in self.ready[lane] if between or not self._chained[at]]
        chosen = rule(self, able) if able else None
        if chosen is None:
            return False
        self.ready[lane].remove(chosen)
        self.free[lane] = self.now + self.duration[chosen]
        self.placed.append((chosen, self.now, self.free[lane]))
        self.running.append((self.free[lane], chosen))
        self.running.sort()
        return True

    def _advance(self) -> None:
        """To the next end, and what waited for the tasks that have ended becomes ready."""
        self.now = max(self.now, self.running[0][0])
        while self.running and self.running[0][0] <= self.now:
            for follower in self.tasks.followers[self.running.pop(0)[1]]:
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self.ready[self.tasks.all[follower].lane].append(follower)


Rule = Callable[[Machine, list[int]], int | None]
"""What a free lane takes of the tasks that are ready for it, if any."""


@dataclass(frozen=True)
class Priority:
    """The task with the highest priority, unless it would keep compute from a higher one that comes meanwhile.

    patience: the longest such delay, as a share of the task's own time; infinite: a free lane always takes one.
    """

    priority: Sequence[float]
    patience: float

    def __call__(self, machine: Machine, ready: list[int]) -> int | None:
        for at in sorted(ready, key=lambda at: (-self.priority[at], at)):
            delay = 0.0 if machine.tasks.all[at].exchange else self._delay(machine, at)
            if not delay or delay <= self.patience * machine.duration[at]:
                return at
        return None

    def _delay(self, machine: Machine, at: int) -> float:
        """How long a task of higher priority, that an exchange now running gives, would wait for this one."""
        end = machine.now + machine.duration[at]
        for ready_at, running in machine.running:
            if ready_at >= end:
                break
            followers = machine.tasks.followers[running]
            if any(machine.missing[f] == 1 and self.priority[f] > self.priority[at] for f in followers):
                return end - ready_at
        return 0.0
