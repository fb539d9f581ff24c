"""A better list schedule: priorities are changed a little at a time, as long as the cell is above its bound."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from schedc.cell.graph import LANES
from schedc.cell.lanes import Machine, Placed, Priority
from schedc.cell.tasks import Tasks

TRIES, TRIES_AT_BOUND = 600, 200
"""Changes that are tried, and of them those of a cell that can only send its outputs earlier. On a pair of four
layers each takes about 0.3 ms."""

SAME = 1e-9
"""Times that differ by less than this part of the cell are the same."""

MANNERS = ((math.inf, 0.0), (math.inf, 1.0), (0.5, 1.0), (0.2, 0.0), (0.0, 1.0))
"""Patience and courtesy (`schedc.cell.lanes.Priority`) that are tried."""


def lower_bound(tasks: Tasks, duration: Sequence[float]) -> float:
    """A time that no order is below: of the longest chain, and of each lane with what must be before and after it."""
    ends = _heads(tasks, duration)
    tail = [0.0] * len(tasks)
    for at in reversed(range(len(tasks))):
        tail[at] = max((tail[after] + duration[after] for after in tasks.followers[at]), default=0.0)
    bound = max(ends, default=0.0)
    for lane in LANES:
        members = [at for at, task in enumerate(tasks.all) if task.lane is lane and duration[at]]
        if members:
            work = sum(duration[at] for at in members)
            bound = max(bound, min(ends[at] - duration[at] for at in members) + work + min(tail[at] for at in members))
    return bound


def improved(tasks: Tasks, duration: Sequence[float], start: Priority, bound: float) -> Placed:
    """The best schedule found from the priorities of ``start``; the same on every machine.

    Changes and comparisons use no function that rounds differently from one machine to another.
    """
    source = random.Random(len(tasks))
    best = start
    placed = Machine(tasks, duration).run(best)
    least = merit(tasks, placed, bound)
    reach = max(1, round(bound / 4 * 1024))
    left = TRIES
    earliest = _steps_of(bound, bound), _steps_of(_leaves(tasks, _heads(tasks, duration)), bound)
    while left > 0 and least > earliest:
        left -= 1 if least[0] > _steps_of(bound, bound) else TRIES // TRIES_AT_BOUND
        priority = list(best.priority)
        for _ in range(source.choice((1, 2, 4))):
            priority[source.randrange(len(priority))] += source.randint(-reach, reach) / 1024
        changed = Priority(priority, *source.choice(MANNERS))
        other = Machine(tasks, duration).run(changed)
        if (value := merit(tasks, other, bound)) <= least:
            best, placed, least = changed, other, value
    return placed


def merit(tasks: Tasks, placed: Placed, bound: float) -> tuple[int, int]:
    """What is least in the best schedule: its time, then when its outputs are complete; equal within rounding."""
    ends = [0.0] * len(tasks)
    for at, _, end in placed:
        ends[at] = end
    return _steps_of(max(ends, default=0.0), bound), _steps_of(_leaves(tasks, ends), bound)


def _leaves(tasks: Tasks, ends: Sequence[float]) -> float:
    """When the output of the forward and the input gradient are complete, summed."""
    return sum(max((ends[at] for at in wanted), default=0.0) for wanted in tasks.leaving if wanted is not None)


def _heads(tasks: Tasks, duration: Sequence[float]) -> list[float]:
    """[tasks] the earliest end of each: of the longest chain up to it."""
    ends = [0.0] * len(tasks)
    for at, task in enumerate(tasks.all):
        ends[at] = max((ends[before] for before in task.after), default=0.0) + duration[at]
    return ends


def _steps_of(time: float, bound: float) -> int:
    return round(time / (bound or 1.0) / SAME)
