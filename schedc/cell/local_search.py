"""Improves a list schedule by small changes of priorities, then of the order, down to a lower bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from math import inf
from typing import NamedTuple

from schedc.cell.compiled_search import CompiledSearch, SearchLoops, interpreted, list_runs, loops_for
from schedc.cell.graph import QUEUES
from schedc.cell.list_scheduler import COMPUTE, MANNERS, Placed, Priority
from schedc.cell.tasks import Tasks

VARIED = 100
"""Number of changed priorities that are tried. On a pair of four layers each takes about 0.3 ms."""

STARTS = 4
"""Number of list schedules of each kind from which changes of the order start: the best that differ."""

ROUNDS = 8
TRIES_PER_TASK = 1500
MOST_STEPS = 3_000_000
"""Rounds in which changes of the order are tried, and the number of changes: so many per task, but in large cells no
more than place `MOST_STEPS` tasks in all. Together they take less than half a second."""

BRIEF = 0.1
"""Share of these numbers in a brief search."""

SORTED = 4
"""Number of changes between two sorts of the tasks by their ends. A task that is later in the order than its queue
requires would keep dependent tasks from earlier positions."""

SLACK = (0.005, 0.005, 0.005, 0.03)
"""Slack of each round in turn, as a share of the bound: how much longer a changed order may be at its start."""

SHARE_FOR_LEAVING = 0.2
"""Share of the tries that make outputs complete earlier without making the cell longer."""

SAME = 1e-9
"""Times that differ by less than this share of the cell count as equal."""


class Tried(NamedTuple):
    """A list schedule, and its `merit`."""

    merit: tuple[int, int]
    placed: Placed

    @classmethod
    def of(cls, tasks: Tasks, placed: Placed, bound: float) -> Tried:
        return cls(merit(tasks, placed, bound), placed)


def varied(tasks: Tasks, duration: Sequence[float], start: Priority, bound: float, effort: float = 1.0) -> list[Tried]:
    """List schedules of changed priorities, beginning with ``start``; none is longer than the one before.

    A changed priority moves all tasks that depend on the change; a changed order moves a single task.
    duration: [tasks] in time units; bound: that of `schedc.cell.bounds.lower_bound`. effort: the share of `VARIED`.
    """
    source = random.Random(len(tasks))
    run = list_runs(tasks, duration)
    best, schedules = start, [Tried.of(tasks, run(start), bound)]
    reach = max(1, round(bound / 4 * 1024))
    for _ in range(int(VARIED * effort)):
        if schedules[-1].merit[0] <= _steps_of(bound, bound):
            break
        priority = list(best.priority)
        for _ in range(source.choice((1, 2, 4))):
            priority[source.randrange(len(priority))] += source.randint(-reach, reach) / 1024
        changed = Priority(priority, *source.choice(MANNERS))
        tried = Tried.of(tasks, run(changed), bound)
        if tried.merit <= schedules[-1].merit:
            best = changed
            schedules.append(tried)
    return schedules


def improved(
    tasks: Tasks, duration: Sequence[float], starts: Sequence[Sequence[Tried]], bound: float, effort: float = 1.0
) -> Placed:
    """The best schedule found from starting schedules of several kinds. It is the same on every machine.

    First the search minimizes the cell's time. Each round begins with another schedule and moves one task at a time
    between its dependencies and its followers. A move stays if the cell gets no longer, or early in a round a little.
    Then the search makes outputs complete earlier, in a cell of the same time.
    duration: [tasks] in time units; bound: that of `schedc.cell.bounds.lower_bound`. effort: the share of the tries.
    """
    kinds = [_distinct(kind) for kind in starts]
    orders = [order for ranked in zip_longest(*kinds) for order in ranked if order is not None]
    whole = min(TRIES_PER_TASK * len(tasks), MOST_STEPS // max(1, len(tasks)))
    tries = int(effort * whole)
    each, last = int(tries * (1 - SHARE_FOR_LEAVING)) // ROUNDS, int(tries * SHARE_FOR_LEAVING)
    if loops := loops_for(whole):
        return placed_in_order(tasks, duration, _by_loops(tasks, duration, orders, bound, (each, last), loops))
    search = _Search(tasks, duration, bound)
    with interpreted():
        search.shortest(orders, each)
        search.leave_earlier(last)
    return search.placed()


def _by_loops(
    tasks: Tasks,
    duration: Sequence[float],
    orders: Sequence[list[int]],
    bound: float,
    tries: tuple[int, int],
    loops: SearchLoops,
) -> list[int]:
    """The best order, by `schedc.cell.search_loops`. tries: of each round, and of those that make outputs earlier."""
    search = CompiledSearch(tasks, duration, _tails(tasks, duration), SAME * bound, loops)
    for number in range(ROUNDS):
        slack = bound * SLACK[number % len(SLACK)]
        if search.shorten(orders[number % len(orders)], bound, slack, tries[0], SORTED):
            break
    search.make_earlier(_leaves(tasks, _heads(tasks, duration)) + search.near, tries[1])
    order: list[int] = search.best.tolist()
    return order


def placed_in_order(tasks: Tasks, duration: Sequence[float], order: list[int]) -> Placed:
    """The schedule that takes the tasks of every queue in this order. duration: [tasks] in time units."""
    search = _Search(tasks, duration, 0.0)
    search.best = order
    return search.placed()


def merit(tasks: Tasks, placed: Placed, bound: float) -> tuple[int, int]:
    """What the best schedule minimizes: the time, then the completion of outputs. Equal within rounding."""
    ends = [0.0] * len(tasks)
    for index, _, end in placed:
        ends[index] = end
    return _steps_of(max(ends, default=0.0), bound), _steps_of(_leaves(tasks, ends), bound)


def _distinct(starts: Sequence[Tried]) -> list[list[int]]:
    """The orders of the best schedules, best first."""
    orders: dict[tuple[int, ...], None] = {}
    for each in sorted(starts, key=lambda tried: tried.merit):
        if len(orders) == STARTS:
            break
        orders[tuple(index for index, _, _ in each.placed)] = None
    return [list(order) for order in orders]


class _Times(NamedTuple):
    """end: [tasks] when each ends. stood: [tasks] how long its queue has been idle until then."""

    end: list[float]
    stood: list[float]


class _Search:
    """The search, with the best order so far and its time."""

    def __init__(self, tasks: Tasks, duration: Sequence[float], bound: float) -> None:
        self.tasks, self.duration, self.bound = tasks, duration, bound
        self.near = SAME * bound
        self.after = [task.after for task in tasks.all]
        self.facts = list(zip(tasks.queues, self.after, duration, _tails(tasks, duration), strict=True))
        self.work = [0.0] * len(QUEUES)
        for index, queue in enumerate(tasks.queues):
            self.work[queue] += duration[index]
        self.used = len(set(tasks.queues))
        self.random = random.Random(len(tasks)).random  # draws the same in every version of Python
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
        """Times of the tasks if every queue takes them in this order; None if the last one ends after ``limit``.

        known: times of an order that is equal before position ``first``. begins: the list to which begins are added.
        """
        facts, chained, work = self.facts, self.tasks.chained, self.work
        if known is None or chained:
            first, end, stood = 0, [0.0] * len(order), [0.0] * len(order)
        else:
            end, stood = known.end.copy(), known.stood.copy()
        free, idle = self._until(order, first, end, stood)
        for index in order[first:]:
            queue, after, duration, tail = facts[index]
            begin = since = free[queue]
            for before in after:
                if end[before] > begin:
                    begin = end[before]
            if chained and index in chained:  # compute waits for the exchange before it, and starts it
                begin = free[COMPUTE] = max(begin, free[COMPUTE])
            if begin > since:
                idle[queue] += begin - since
                if idle[queue] > limit - work[queue]:
                    return None
            end[index] = free[queue] = done = begin + duration
            if done + tail > limit:
                return None
            stood[index] = idle[queue]
            if begins is not None:
                begins.append(begin)
        return _Times(end, stood)

    def _until(
        self, order: Sequence[int], first: int, end: Sequence[float], stood: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """[queues] when each is free for the task at position ``first``, and how long it has been idle until then."""
        free, idle = [0.0] * len(QUEUES), [0.0] * len(QUEUES)
        queues, seen, missing = self.tasks.queues, [False] * len(QUEUES), self.used
        while first and missing:
            first -= 1
            index = order[first]
            queue = queues[index]
            if not seen[queue]:
                free[queue], idle[queue] = end[index], stood[index]
                seen[queue] = True
                missing -= 1
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
                if (changed_times := self.times(changed, limit, times, first)) is not None:
                    order, times, time = changed, changed_times, self._time(changed_times)
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
            changed_times = self.times(changed, self.time + self.near, times, first)
            if changed_times is not None and (now := _leaves(self.tasks, changed_times.end)) <= leaves + self.near:
                self.best, times, leaves = changed, changed_times, min(now, leaves)

    def placed(self) -> Placed:
        begins: list[float] = []
        ends = self._all(self.best, begins).end
        return [(index, begin, ends[index]) for index, begin in zip(self.best, begins, strict=True)]

    def _all(self, order: Sequence[int], begins: list[float] | None = None) -> _Times:
        times = self.times(order, begins=begins)
        assert times is not None
        return times

    def _time(self, times: _Times) -> float:
        return max(times.end, default=0.0)

    def _changed(self, order: list[int]) -> tuple[list[int], int]:
        """The order with a task moved in its queue, between dependencies and followers.

        Also gives the first position that differs. Returns the order itself if the task has no other position."""
        place = source = int(self.random() * len(order))
        index, queues = order[source], self.tasks.queues
        before, behind, queue = self.after[index], self.tasks.followers[index], queues[index]
        places: list[int] = []  # those of its queue: among tasks of other queues the move would change no time
        while place and (other := order[place - 1]) not in before:
            place -= 1
            if queues[other] == queue:
                places.append(place)
        places.reverse()
        place, end = source + 1, len(order)
        while place < end and (other := order[place]) not in behind:
            if queues[other] == queue:
                places.append(place)
            place += 1
        if not places:
            return order, end
        goal = places[int(self.random() * len(places))]
        changed = order.copy()
        del changed[source]
        changed.insert(goal, index)
        return changed, min(source, goal)


def _leaves(tasks: Tasks, ends: Sequence[float]) -> float:
    """Sum of the times at which the forward's output and the input gradient are complete."""
    return sum(max((ends[index] for index in wanted), default=0.0) for wanted in tasks.leaving if wanted is not None)


def _heads(tasks: Tasks, duration: Sequence[float]) -> list[float]:
    """[tasks] the earliest end of each: the time of the longest chain up to it."""
    ends = [0.0] * len(tasks)
    for index, task in enumerate(tasks.all):
        ends[index] = max((ends[before] for before in task.after), default=0.0) + duration[index]
    return ends


def _tails(tasks: Tasks, duration: Sequence[float]) -> list[float]:
    """[tasks] the time of the longest chain behind each."""
    path = tasks.longest_paths(duration)
    return [max((path[follower] for follower in behind), default=0.0) for behind in tasks.followers]


def _steps_of(time: float, bound: float) -> int:
    return round(time / (bound or 1.0) / SAME)
