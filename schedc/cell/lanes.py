"""List scheduling: tasks on one compute lane and two exchange lanes, each lane taking what a rule gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schedc.cell.graph import LANES, Lane
from schedc.cell.tasks import Tasks

Placed = list[tuple[int, float, float]]
"""Tasks with start and end, in the order in which they were chosen."""


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
    """The task with the highest priority, unless it would keep its lane from a higher one that comes meanwhile.

    patience: how long such a task may have to wait, as a share of the time of the one that is taken; with infinite
        patience a free lane always takes a task. courtesy: the same for exchanges, of how long the lane would be left
        free: short ones, as the counts before a dispatch, need not queue behind long ones then.
    """

    priority: Sequence[float]
    patience: float
    courtesy: float

    def __call__(self, machine: Machine, ready: list[int]) -> int | None:
        for at in sorted(ready, key=lambda at: (-self.priority[at], at)):
            coming = self._coming(machine, at)
            if coming is None:
                return at
            time = machine.duration[at]
            if machine.tasks.all[at].exchange:
                give_way = coming - machine.now <= self.courtesy * time
            else:
                give_way = machine.now + time - coming > self.patience * time
            if not give_way:
                return at
        return None

    def _coming(self, machine: Machine, at: int) -> float | None:
        """When, while this task would run, what runs now makes one of higher priority ready for the same lane."""
        end, lane = machine.now + machine.duration[at], machine.tasks.all[at].lane
        for ready_at, running in machine.running:
            if ready_at >= end:
                break
            for follower in machine.tasks.followers[running]:
                higher = self.priority[follower] > self.priority[at] and machine.missing[follower] == 1
                if higher and machine.tasks.all[follower].lane is lane:
                    return ready_at
        return None
