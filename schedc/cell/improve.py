"""A better list schedule: priorities are changed a little at a time, as long as the cell is above its bound."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from schedc.cell.graph import LANES
from schedc.cell.lanes import Machine, Placed, Priority
from schedc.cell.tasks import Tasks

TRIES = 600
"""Changes that are tried; on a pair of four layers each takes about 0.3 ms."""

MANNERS = ((math.inf, 0.0), (math.inf, 1.0), (0.5, 1.0), (0.2, 0.0), (0.0, 1.0))
"""Patience and courtesy (`schedc.cell.lanes.Priority`) that are tried."""

_ROUNDING = 1e-9


def lower_bound(tasks: Tasks, duration: Sequence[float]) -> float:
    """A time that no order is below: of the longest chain, and of each lane with what must be before and after it."""
    head, tail = [0.0] * len(tasks), [0.0] * len(tasks)
    for at, task in enumerate(tasks.all):
        head[at] = max((head[before] + duration[before] for before in task.after), default=0.0)
    for at in reversed(range(len(tasks))):
        tail[at] = max((tail[after] + duration[after] for after in tasks.followers[at]), default=0.0)
    bound = max((head[at] + duration[at] + tail[at] for at in range(len(tasks))), default=0.0)
    for lane in LANES:
        members = [at for at, task in enumerate(tasks.all) if task.lane is lane and duration[at]]
        if members:
            work = sum(duration[at] for at in members)
            bound = max(bound, min(head[at] for at in members) + work + min(tail[at] for at in members))
    return bound


def improved(tasks: Tasks, duration: Sequence[float], start: Priority, bound: float) -> Placed:
    """The best schedule found from the priorities of ``start``; the same on every machine.

    Changes and comparisons use no function that rounds differently from one machine to another.
    """
    source = random.Random(len(tasks))
    best = start
    placed = Machine(tasks, duration).run(best)
    time = finish(placed)
    reach = max(1, round(bound / 4 * 1024))
    for _ in range(TRIES):
        if time <= bound * (1 + _ROUNDING):
            break
        priority = list(best.priority)
        for _ in range(source.choice((1, 2, 4))):
            priority[source.randrange(len(priority))] += source.randint(-reach, reach) / 1024
        changed = Priority(priority, *source.choice(MANNERS))
        other = Machine(tasks, duration).run(changed)
        if finish(other) <= time * (1 + _ROUNDING):
            best, placed, time = changed, other, finish(other)
    return placed


def finish(placed: Placed) -> float:
    """The end of the last task."""
    return max((end for _, _, end in placed), default=0.0)
