"""The search of `schedc.cell.local_search` by compiled loops: when compilation pays, and the loops' arguments."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from schedc.cell import search_loops
from schedc.cell.graph import QUEUES
from schedc.cell.list_scheduler import COMPUTE, LaneClock, Placed, Priority
from schedc.cell.search_loops import DRAWS, Graph, Round
from schedc.cell.tasks import Tasks
from schedc.ir.arrays import Floats, Int64
from schedc.ir.compiled import IMPORT_SECONDS, called_from_loops, compile_seconds, jit

_COMPILE_SECONDS = 9.0
"""What compiling the loops costs, once on a machine."""

_WORTH = 1500
"""Tries that the interpreted search makes in about the time that the loops take to be given a cell."""

_HELPERS = (
    "fill_times", "is_among", "pick_move", "move_task", "sort_by_end", "latest_end", "largest",
    "end_running", "enqueue", "remove_ready", "add_running", "pick_ready", "is_before", "may_start",
)  # fmt: skip


@dataclass(frozen=True)
class SearchLoops:
    """`shorten`, `make_earlier` and `run_list` of `schedc.cell.search_loops`, compiled or not."""

    shorten: Any = search_loops.shorten
    make_earlier: Any = search_loops.make_earlier
    run_list: Any = search_loops.run_list


_interpreted_seconds = [0.0]


@contextmanager
def interpreted() -> Iterator[None]:
    """Adds the CPU time of a search without loops. They are loaded once all searches took what loading costs."""
    begin = process_time()  # a browser's Python has no clock of threads
    yield
    _interpreted_seconds[0] += process_time() - begin


@contextmanager
def first_of(count: int) -> Iterator[None]:
    """Adds what searches inside take ``count`` times: as many like them are to come."""
    before = _interpreted_seconds[0]
    yield
    _interpreted_seconds[0] += (count - 1) * (_interpreted_seconds[0] - before)


def loops_for(tries: int) -> SearchLoops | None:
    """The compiled loops, None without numba or while they are not worth it for so many tries."""
    if tries < _WORTH or _interpreted_seconds[0] < IMPORT_SECONDS:
        return None
    return load() if _interpreted_seconds[0] >= IMPORT_SECONDS + _compile_seconds() else None


@cache
def _compile_seconds() -> float:
    return compile_seconds(Path(search_loops.__file__), _COMPILE_SECONDS)


@cache
def load() -> SearchLoops | None:
    """The compiled loops, None without numba."""
    if (compiled := jit()) is None:
        return None
    for name in _HELPERS:
        called_from_loops(getattr(search_loops, name))
    shorten, make_earlier, run_list = search_loops.shorten, search_loops.make_earlier, search_loops.run_list
    return SearchLoops(compiled(shorten), compiled(make_earlier), compiled(run_list))


def list_runs(tasks: Tasks, duration: Sequence[float]) -> Callable[[Priority], Placed]:
    """What runs list schedules of one cell, by loops where they are loaded. duration: [tasks] in time units."""
    if loops := loops_for(_WORTH):
        return ListRuns(tasks, duration, loops)
    return lambda rule: LaneClock(tasks, duration).run(rule)


class ListRuns:
    """`LaneClock.run` under any `Priority`, by loops. duration: [tasks] in time units."""

    def __init__(self, tasks: Tasks, duration: Sequence[float], loops: SearchLoops) -> None:
        self.graph = graph_of_tasks(tasks, duration, [0.0] * len(tasks))
        self.needs = np.array(tasks.needs, np.int64)
        self.run_list = loops.run_list

    def __call__(self, rule: Priority) -> Placed:
        order, begins = np.zeros(self.needs.size, np.int64), np.zeros(self.needs.size)
        priority, manner = np.array(rule.priority, float), (rule.patience, rule.courtesy)
        count, ends = self.run_list(self.graph, self.needs.copy(), priority, manner, COMPUTE, order, begins)
        placed = order[:count]
        return list(zip(placed.tolist(), begins[:count].tolist(), ends[placed].tolist(), strict=True))


class CompiledSearch:
    """What the interpreted search does, with the same results; `best` and `time` as there.

    duration, tail: [tasks] in time units.
    """

    def __init__(
        self, tasks: Tasks, duration: Sequence[float], tail: Sequence[float], near: float, loops: SearchLoops
    ) -> None:
        self.loops, self.near = loops, near
        self.graph = graph_of_tasks(tasks, duration, tail)
        self.used, self.draws = len(set(tasks.queues)), _Draws(len(tasks))
        self.best: Int64 = np.zeros(len(tasks), np.int64)
        self.time = inf

    def shorten(self, order: Sequence[int], bound: float, slack: float, tries: int, sorted_every: int) -> bool:
        """One round from ``order``; whether it ended at the bound."""
        ended, self.time, taken = self.loops.shorten(
            self.graph,
            Round(tries, self.time, bound, self.near, slack, COMPUTE, self.used, sorted_every),
            np.array(order, np.int64),
            self.best,
            self.draws.ahead(DRAWS * tries),
        )
        self.draws.take(taken)
        return bool(ended)

    def make_earlier(self, earliest: float, tries: int) -> None:
        """Makes outputs of the best order complete earlier."""
        step = Round(tries, self.time, 0.0, self.near, 0.0, COMPUTE, self.used, 1)
        self.loops.make_earlier(self.graph, step, self.best, earliest, self.draws.ahead(DRAWS * tries))


class _Draws:
    """The numbers of ``random.Random(seed).random``, many at a time."""

    def __init__(self, seed: int) -> None:
        _, state, _ = random.Random(seed).getstate()
        self._source = np.random.RandomState()
        self._source.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))
        self._ahead: Floats = np.zeros(0)

    def ahead(self, count: int) -> Floats:
        """[at least ``count``] the next numbers; they stay the next ones."""
        if (missing := count - self._ahead.size) > 0:
            self._ahead = np.concatenate([self._ahead, self._source.random_sample(missing)])
        return self._ahead

    def take(self, count: int) -> None:
        """Leaves out the next ``count`` numbers."""
        self._ahead = self._ahead[count:]


def graph_of_tasks(tasks: Tasks, duration: Sequence[float], tail: Sequence[float]) -> Graph:
    """The arrays of the loops. duration, tail: [tasks]."""
    after, after_start = _in_a_row([task.after for task in tasks.all])
    followers, followers_start = _in_a_row(tasks.followers)
    chained = np.zeros(len(tasks) if tasks.chained else 0, np.bool_)
    chained[list(tasks.chained)] = True
    work = [0.0] * len(QUEUES)
    for index, queue in enumerate(tasks.queues):
        work[queue] += duration[index]
    output, gradient = (np.array(wanted or (), np.int64) for wanted in tasks.leaving)
    return Graph(
        queue=np.array(tasks.queues, np.int64),
        duration=np.array(duration, float),
        tail=np.array(tail, float),
        after=after,
        after_start=after_start,
        followers=followers,
        followers_start=followers_start,
        chained=chained,
        work=np.array(work),
        output=output,
        gradient=gradient,
    )


def _in_a_row(lists: Iterable[Sequence[int]]) -> tuple[Int64, Int64]:
    """All lists one behind the other, and where each begins, with the end of the last."""
    parts = list(lists)
    start = np.zeros(len(parts) + 1, np.int64)
    start[1:] = np.cumsum([len(part) for part in parts])
    return np.array([index for part in parts for index in part], np.int64), start
