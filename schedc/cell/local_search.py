"""A better list schedule: priorities and then the order are changed a little, while the cell is above its bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from math import inf
from typing import NamedTuple

from schedc.cell.graph import QUEUES
from schedc.cell.list_scheduler import COMPUTE, MANNERS, LaneClock, Placed, Priority
from schedc.cell.tasks import Tasks

VARIED = 100
"""Changes of priorities that are tried. On a pair of four layers each takes about 0.3 ms."""

STARTS = 4
"""List schedules from which orders are changed: of either kind the best ones that differ."""

ROUNDS = 8
TRIES_PER_TASK = 1500
MOST_STEPS = 3_000_000
"""Changes of orders that are tried, in so many rounds: some per task, and in large cells only as many as make so many
placements of a task. Together they take less than half a second."""

SORTED = 4
"""After so many changes tasks are sorted by their ends, so that none stands later than its queue would have it, which
keeps those that need it from places where they could be."""

SLACK = (0.005, 0.005, 0.005, 0.03)
"""How much longer than the one before an order may be at the start of a round, as a share of the bound; in turn."""

SHARE_FOR_LEAVING = 0.2
"""Of the tries, those that make outputs leave earlier in a cell of the same time."""

SAME = 1e-9
"""Times that differ by less than this part of the cell are the same."""


def lower_bound(tasks: Tasks, duration: Sequence[float]) -> float:
    """A time that no order is below: of the longest chain, and of each queue with what must be before and after it."""
    ends, tail = _heads(tasks, duration), _tails(tasks, duration)
    bound = max(ends, default=0.0)
    for queue in range(len(QUEUES)):
        members = [at for at, own in enumerate(tasks.queues) if own == queue and duration[at]]
        if members:
            work = sum(duration[at] for at in members)
            bound = max(bound, min(ends[at] - duration[at] for at in members) + work + min(tail[at] for at in members))
    return bound


def varied(tasks: Tasks, duration: Sequence[float], start: Priority, bound: float) -> list[Placed]:
    """List schedules of priorities that differ from those of ``start`` more and more, none longer than the one before.

    A list schedule moves all that follows from a change, which orders changed task by task do not.
    """
    source = random.Random(len(tasks))
    best, found = start, [LaneClock(tasks, duration).run(start)]
    least = merit(tasks, found[0], bound)
    reach = max(1, round(bound / 4 * 1024))
    for _ in range(VARIED):
        if least[0] <= _steps_of(bound, bound):
            break
        priority = list(best.priority)
        for _ in range(source.choice((1, 2, 4))):
            priority[source.randrange(len(priority))] += source.randint(-reach, reach) / 1024
        changed = Priority(priority, *source.choice(MANNERS))
        other = LaneClock(tasks, duration).run(changed)
        if (value := merit(tasks, other, bound)) <= least:
            best, least = changed, value
            found.append(other)
    return found


def improved(tasks: Tasks, duration: Sequence[float], starts: Sequence[Sequence[Placed]], bound: float) -> Placed:
    """The best schedule found from others of several kinds; the same on every machine: it only adds and compares.

    First the shortest one: in rounds from different schedules, each round one task moved at a time to another place
    between what it needs and what needs it, and kept if the cell gets no longer, or at the start of a round a little.
    Then, in the same time, one whose outputs are complete earlier.
    """
    kinds = [_distinct(tasks, kind, bound) for kind in starts]
    orders = [order for ranked in zip_longest(*kinds) for order in ranked if order is not None]
    search = _Search(tasks, duration, bound)
    tries = min(TRIES_PER_TASK * len(tasks), MOST_STEPS // max(1, len(tasks)))
    search.shortest(orders, int(tries * (1 - SHARE_FOR_LEAVING)) // ROUNDS)
    search.leave_earlier(int(tries * SHARE_FOR_LEAVING))
    return search.placed()


def merit(tasks: Tasks, placed: Placed, bound: float) -> tuple[int, int]:
    """What is least in the best schedule: its time, then when its outputs are complete; equal within rounding."""
    ends = [0.0] * len(tasks)
    for at, _, end in placed:
        ends[at] = end
    return _steps_of(max(ends, default=0.0), bound), _steps_of(_leaves(tasks, ends), bound)


def _distinct(tasks: Tasks, starts: Sequence[Placed], bound: float) -> list[list[int]]:
    """The orders of the best schedules, best first."""
    ranked = sorted(starts, key=lambda placed: merit(tasks, placed, bound))
    orders = dict.fromkeys(tuple(at for at, _, _ in placed) for placed in ranked)
    return [list(order) for order in orders][:STARTS]


class _Times(NamedTuple):
    """end: [tasks] when each ends. stood: [tasks] for how long its queue has stood idle by then."""

    end: list[float]
    stood: list[float]


class _Search:
    """The best order so far, ``best``, and the time that it takes."""

    def __init__(self, tasks: Tasks, duration: Sequence[float], bound: float) -> None:
        self.tasks, self.duration, self.bound = tasks, duration, bound
        self.near = SAME * bound
        self.after = [task.after for task in tasks.all]
        self.facts = list(zip(tasks.queues, self.after, duration, _tails(tasks, duration), strict=True))
        self.work: dict[int, float] = {}
        for at, queue in enumerate(tasks.queues):
            self.work[queue] = self.work.get(queue, 0.0) + duration[at]
        self.random = random.Random(len(tasks)).random  # the draw that every version of Python does alike
        self.best: list[int] = []
        self.time = 0.0

    def times(
        self,
        order: Sequence[int],
        limit: float = inf,
        known: _Times | None = None,
        first: int = 0,
        begins: list[float] | None = None,
    ) -> _Times | None:
        """When each task ends, if every queue takes its tasks in this order; None if the last one ends after ``limit``.

        known: the times of an order that is the same before place ``first``. ``begins`` gets when they begin.
        """
        facts, chained = self.facts, self.tasks.chained
        if known is None or chained:
            first, end, stood = 0, [0.0] * len(order), [0.0] * len(order)
        else:
            end, stood = known.end.copy(), known.stood.copy()
        free, idle = self._until(order, first, end, stood)
        room = [limit - self.work.get(queue, 0.0) for queue in range(len(QUEUES))]
        for at in order[first:]:
            queue, after, duration, tail = facts[at]
            begin = since = free[queue]
            for before in after:
                if end[before] > begin:
                    begin = end[before]
            if chained and at in chained:  # compute waits for the exchange before it, and starts it
                begin = free[COMPUTE] = max(begin, free[COMPUTE])
            if begin > since:
                idle[queue] += begin - since
                if idle[queue] > room[queue]:
                    return None
            end[at] = free[queue] = done = begin + duration
            if done + tail > limit:
                return None
            stood[at] = idle[queue]
            if begins is not None:
                begins.append(begin)
        return _Times(end, stood)

    def _until(
        self, order: Sequence[int], first: int, end: Sequence[float], stood: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """[queues] when each is free for what comes at place ``first``, and for how long it has stood idle."""
        free, idle = [0.0] * len(QUEUES), [0.0] * len(QUEUES)
        left = set(self.work)
        for at in reversed(order[:first]):
            queue = self.tasks.queues[at]
            if queue in left:
                free[queue], idle[queue] = end[at], stood[at]
                left.remove(queue)
                if not left:
                    break
        return free, idle

    def shortest(self, orders: Sequence[list[int]], tries: int) -> None:
        self.best, self.time = orders[0], self._time(self._all(orders[0]))
        for number in range(ROUNDS):
            order, allowed = orders[number % len(orders)], self.bound * SLACK[number % len(SLACK)]
            times = self._all(order)
            time = self._time(times)
            if time < self.time - self.near:
                self.best, self.time = order, time
            for left in range(tries, 0, -1):
                if self.time <= self.bound + self.near:
                    return
                if not left % SORTED and not self.tasks.chained:
                    order = sorted(order, key=times.end.__getitem__)
                changed, first = self._changed(order)
                if changed is order:
                    continue
                limit = time + self.near + allowed * left / tries * self.random()
                if (found := self.times(changed, limit, times, first)) is not None:
                    order, times, time = changed, found, self._time(found)
                    if time < self.time - self.near:
                        self.best, self.time = order, time

    def leave_earlier(self, tries: int) -> None:
        earliest = _leaves(self.tasks, _heads(self.tasks, self.duration)) + self.near
        times = self._all(self.best)
        leaves = _leaves(self.tasks, times.end)
        for _ in range(tries):
            if leaves <= earliest:
                return
            changed, first = self._changed(self.best)
            if changed is self.best:
                continue
            found = self.times(changed, self.time + self.near, times, first)
            if found is not None and (now := _leaves(self.tasks, found.end)) <= leaves + self.near:
                self.best, times, leaves = changed, found, min(now, leaves)

    def placed(self) -> Placed:
        begins: list[float] = []
        ends = self._all(self.best, begins).end
        return [(at, begin, ends[at]) for at, begin in zip(self.best, begins, strict=True)]

    def _all(self, order: Sequence[int], begins: list[float] | None = None) -> _Times:
        times = self.times(order, begins=begins)
        assert times is not None
        return times

    def _time(self, times: _Times) -> float:
        return max(times.end, default=0.0)

    def _changed(self, order: list[int]) -> tuple[list[int], int]:
        """The order with one task elsewhere in its queue, between what it needs and what needs it, and the first place
        that differs; the order itself where the task can be nowhere else."""
        source = int(self.random() * len(order))
        at = order[source]
        before, behind = self.after[at], self.tasks.followers[at]
        first = last = source
        while first and order[first - 1] not in before:
            first -= 1
        while last + 1 < len(order) and order[last + 1] not in behind:
            last += 1
        queue, queues = self.tasks.queues[at], self.tasks.queues
        places = [place for place in range(first, last + 1) if queues[order[place]] == queue and place != source]
        if not places:  # among tasks of other queues it would be done at the same time
            return order, len(order)
        goal = places[int(self.random() * len(places))]
        changed = order[:source] + order[source + 1 :]
        changed.insert(goal, at)
        return changed, min(source, goal)


def _leaves(tasks: Tasks, ends: Sequence[float]) -> float:
    """When the output of the forward and the input gradient are complete, summed."""
    return sum(max((ends[at] for at in wanted), default=0.0) for wanted in tasks.leaving if wanted is not None)


def _heads(tasks: Tasks, duration: Sequence[float]) -> list[float]:
    """[tasks] the earliest end of each: of the longest chain up to it."""
    ends = [0.0] * len(tasks)
    for at, task in enumerate(tasks.all):
        ends[at] = max((ends[before] for before in task.after), default=0.0) + duration[at]
    return ends


def _tails(tasks: Tasks, duration: Sequence[float]) -> list[float]:
    """[tasks] the time of the longest chain behind each."""
    tail = [0.0] * len(tasks)
    for at in reversed(range(len(tasks))):
        tail[at] = max((tail[after] + duration[after] for after in tasks.followers[at]), default=0.0)
    return tail


def _steps_of(time: float, bound: float) -> int:
    return round(time / (bound or 1.0) / SAME)
