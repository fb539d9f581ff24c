"""Finds orders by many list schedules: from slot patterns, from known orders, and from variations of the best.

Each list schedule is justified: its cells are scheduled again from the end of the step, the last first. Then they are
scheduled again from the start. This mends most of what a greedy order does badly near its ends (Li and Willis,
EJOR 56, 1992; Valls, Ballestin and Quintanilla, EJOR 165, 2005).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import util
from threading import Event
from time import perf_counter
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Int64, bincount, repeat
from schedc.ir.compiled import IMPORT_SECONDS
from schedc.ir.op_tables import TURN
from schedc.ir.ops import OpKind
from schedc.search.greedy import Order, memory_changes_of
from schedc.search.list_loop import FAR, RESERVES, ListOps, ListRunner, seconds_to_compile
from schedc.search.problem import SearchProblem, stage_key
from schedc.search.slots import SlotCells

_BEAT = 0.1
"""Seconds between two checks for Ctrl-C."""
_KEPT = 8
"""Orders that are varied."""
_ROUNDS = 6
"""Most times that an order is justified."""
_LEAST_TRIES = 400
"""Tries without a better order after which the search ends; it goes on for twice the tries that the best one took."""
_NOISE = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Mean durations by which starts are moved in a variation."""
_SECONDS_PER_CELL = 1e-4
"""Seconds of a try per cell in Python."""
_STEPS = 16
"""Steps of a priority per tick of a start."""


class FoundOrder(NamedTuple):
    """An order within the cap. makespan: ticks; start: [cells] ticks; reserve, patient: the ways of its list schedule.

    origin: "slots" for a pattern, else the name that the start was given with.
    """

    makespan: int
    start: Int64
    reserve: int
    patient: int
    origin: str


@dataclass(frozen=True)
class ListEffort:
    """When the search ends, besides its own patience. seconds, tries: None for no limit. bound: ticks to reach.

    workers: searches side by side, each with its own tries, where the loop is compiled.
    """

    seconds: float | None
    tries: int | None
    bound: int
    seed: int = 0
    workers: int = 1


@dataclass(frozen=True, eq=False)
class ListProblem:
    """A problem as list schedules take it, from both ends and under other costs."""

    problem: SearchProblem
    compiled: bool

    @cached_property
    def forward(self) -> ListRunner:
        problem, dependencies = self.problem, self.problem.dependencies
        takes, gives = memory_changes_of(problem)
        kind = problem.schedule.kind[dependencies.first]
        queue = (stage_key(problem.schedule) * 3)[dependencies.first] + TURN[kind]
        cells = np.lexsort((queue, dependencies.rank)).astype(np.int64)
        edge = np.flatnonzero(np.append(True, (np.diff(queue[cells]) != 0) | (np.diff(dependencies.rank[cells]) != 0)))
        room = np.full(dependencies.rank_start.size - 1, FAR) if problem.capacity is None else problem.capacity
        alone = (kind == OpKind.W) & (dependencies.second < 0)
        return ListRunner.of(
            ListOps(
                rank_queue=np.searchsorted(edge, dependencies.rank_start).astype(np.int64),
                queue_start=np.append(edge, cells.size).astype(np.int64),
                queue_cell=cells,
                duration=problem.duration.astype(np.int64),
                **_arcs(problem.before, problem.after, problem.lag, cells.size),
                takes=np.array(takes, np.int64),
                gives=np.array(gives, np.int64),
                filler=alone.astype(np.int64),
                room=room.astype(np.int64),
            ),
            self.compiled,
        )

    @cached_property
    def backward(self) -> ListRunner:
        """The same problem reversed in time: what an end frees is taken at a start."""
        ops, problem = self.forward.ops, self.problem
        start, cells = np.array(ops.queue_start), np.array(ops.queue_cell)
        place = np.arange(cells.size) - repeat(start[:-1], np.diff(start))
        reverse = cells[repeat(start[1:], np.diff(start)) - 1 - place]
        return self.forward.replaced(
            queue_cell=reverse,
            **_arcs(problem.after, problem.before, problem.lag, cells.size),
            takes=np.array(ops.gives),
            gives=np.array(ops.takes),
            filler=np.zeros(cells.size, np.int64),
        )

    def fixed(self, start: Int64) -> ListRunner:
        """Prices the order in which ranks start cells so. start: [cells]."""
        bounds = self.problem.dependencies.rank_start.astype(np.int64)
        cells = np.lexsort((start, self.problem.dependencies.rank)).astype(np.int64)
        return self.forward.replaced(rank_queue=np.arange(bounds.size), queue_start=bounds, queue_cell=cells)

    @cached_property
    def alike(self) -> bool:
        """Whether all cells take the same time and messages none, so that no other costs are tried."""
        return bool((self.problem.duration == self.problem.duration[0]).all() and not self.problem.lag.any())


def _arcs(before: Int64, after: Int64, lag: Int64, cells: int) -> dict[str, Int64]:
    order = np.argsort(after, kind="stable")
    first = np.append(0, np.cumsum(bincount(after, minlength=cells)))
    return {
        "first": first.astype(np.int64),
        "needs": before[order].astype(np.int64),
        "lag": lag[order].astype(np.int64),
    }


def worth_compiling(cells: int, limits: ListEffort) -> bool:
    """Whether the loop is compiled for a search. The search takes longer in Python than loading costs."""
    tries = _LEAST_TRIES if limits.tries is None else min(limits.tries, _LEAST_TRIES)
    seconds = min(cells * tries * _SECONDS_PER_CELL, limits.seconds or FAR)
    return util.find_spec("numba") is not None and seconds > IMPORT_SECONDS + seconds_to_compile()


def start_order(start: Int64) -> Order:
    """The cells by their starts. start: [cells] ticks."""
    order: Order = np.argsort(start, kind="stable").tolist()
    return order


def search_side_by_side(
    lists: ListProblem,
    starts: Sequence[tuple[str, Int64]],
    limits: ListEffort,
    progress: Callable[[int], None] = lambda makespan: None,
) -> FoundOrder | None:
    """The best of several searches in threads, which share out the known orders. Ctrl-C ends them.

    Compiled loops run in parallel. starts: names and [cells] as for `search_orders`. progress: with falling makespans.
    """
    workers, stop, best = limits.workers if lists.compiled else 1, Event(), [FAR]
    _ = lists.forward, lists.backward  # made once, before threads ask for them

    def told(makespan: int) -> None:
        if makespan < best[0]:
            best[0] = makespan
            progress(makespan)

    def search(number: int) -> FoundOrder | None:
        own = replace(limits, seed=limits.seed * limits.workers + number)
        found = search_orders(lists, starts[number::workers], own, told, stop)
        if limits.tries is None and found is not None and found.makespan <= limits.bound:
            stop.set()
        return found

    with ThreadPoolExecutor(workers) as threads:
        running = [threads.submit(search, number) for number in range(workers)]
        try:
            while not wait(running, _BEAT).done >= {*running}:
                pass
        except KeyboardInterrupt:
            stop.set()
            raise
    found = [each for each in (future.result() for future in running) if each is not None]
    return min(found, key=lambda order: order.makespan, default=None)


def search_orders(
    lists: ListProblem,
    starts: Sequence[tuple[str, Int64]],
    limits: ListEffort,
    progress: Callable[[int], None] = lambda makespan: None,
    stop: Event | None = None,
) -> FoundOrder | None:
    """The best order that is found; None if none keeps within the cap.

    starts: names and priorities, [cells], of known orders. progress: takes each better makespan, in ticks.
    stop: ends the search when it is set.
    """
    draw, began = np.random.default_rng(limits.seed), perf_counter()
    drawn = _Drawn(lists, SlotCells.of(lists.problem), draw)
    pool: list[FoundOrder] = []
    tries = last = 0
    first = [(name, priority, reserve) for reserve in (RESERVES, *range(RESERVES)) for name, priority in starts]
    while True:
        found = drawn.known(*first[tries]) if tries < len(first) else drawn.another(pool)
        tries += 1
        if found is not None and (not pool or found.makespan < pool[0].makespan):
            last = tries
            progress(found.makespan)
        pool = _kept(pool, found)
        out = limits.seconds is not None and perf_counter() - began > limits.seconds
        out = out or (stop is not None and stop.is_set())
        out = out or (limits.tries is not None and tries >= limits.tries)
        if out or (pool and pool[0].makespan <= limits.bound) or tries > len(first) + _LEAST_TRIES + 2 * last:
            return pool[0] if pool else None


def _kept(pool: list[FoundOrder], found: FoundOrder | None) -> list[FoundOrder]:
    """The best orders, no two of them alike."""
    if found is None or (len(pool) == _KEPT and found.makespan > pool[-1].makespan):
        return pool
    if any(found.makespan == other.makespan and np.array_equal(found.start, other.start) for other in pool):
        return pool
    return sorted([found, *pool], key=lambda order: order.makespan)[:_KEPT]


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Makes orders at random."""

    lists: ListProblem
    cells: SlotCells
    draw: np.random.Generator

    def known(self, name: str, priority: Int64, reserve: int) -> FoundOrder | None:
        """A known order as it is, where ``reserve`` is `RESERVES`, or as priorities with this way to reserve room."""
        if reserve < RESERVES:
            return self._made(priority, reserve, 0, name)
        makespan, start = self.lists.fixed(priority)(priority)
        return None if makespan < 0 else self._justified(FoundOrder(makespan, start, 1, 0, name))

    def another(self, pool: list[FoundOrder]) -> FoundOrder | None:
        """A pattern, or a variation of one of the best orders."""
        draw, reserve, patient = self.draw, int(self.draw.integers(RESERVES)), int(self.draw.integers(2))
        if len(pool) < _KEPT or draw.random() < 0.5:
            return self._made(self.cells.priority(draw), reserve, patient, "slots")
        order = pool[int(len(pool) * draw.random() ** 2)]
        if draw.random() < 0.8:
            reserve, patient = order.reserve, order.patient
        return self._made(self._moved(order), reserve, patient, order.origin)

    def _moved(self, order: FoundOrder) -> Int64:
        """[cells] the starts of an order with noise: on all cells, on those of a rank, or in a window of time."""
        draw, problem = self.draw, self.lists.problem
        noise = draw.normal(0, float(draw.choice(_NOISE)) * problem.duration.mean(), len(problem))
        where = int(draw.integers(3))
        if where == 0:
            noise *= problem.dependencies.rank == draw.integers(problem.dependencies.rank_start.size - 1)
        elif where == 1:
            low, high = np.sort(draw.random(2)) * order.makespan
            noise *= (order.start >= low) & (order.start <= high)
        return ((order.start + noise) * _STEPS).astype(np.int64)

    def _made(self, priority: Int64, reserve: int, patient: int, origin: str) -> FoundOrder | None:
        """The list schedule by priorities, under the costs or under others, justified."""
        runner = self.lists.forward
        if not self.lists.alike and self.draw.random() < 0.5:
            _, start = self._other_costs(runner)(priority, reserve, patient)
            if (start < 0).any():
                return None
            makespan, start = self.lists.fixed(start)(priority)
        else:
            makespan, start = runner(priority, reserve, patient)
        found = FoundOrder(makespan, start, reserve, patient, origin)
        return None if makespan < 0 else self._justified(found)

    def _other_costs(self, runner: ListRunner) -> ListRunner:
        """The loop under costs near the given ones: equal times, factors of kinds, latency of messages more or less."""
        draw, ops = self.draw, runner.ops
        duration, lag = np.array(ops.duration), np.array(ops.lag)
        time = np.full(duration.size, duration.mean()) if draw.random() < 0.5 else duration.astype(float)
        factor = draw.uniform(0.8, 1.25, 3) if draw.random() < 0.5 else np.ones(3)
        time = np.maximum(np.rint(time * factor[self.cells.turn]), 1).astype(np.int64)
        return runner.replaced(duration=time, lag=(lag * float(draw.choice([0, 0, 1, 2]))).astype(np.int64))

    def _justified(self, found: FoundOrder) -> FoundOrder:
        """The best of an order and what becomes of it, scheduled from the end and from the start by turns."""
        duration, best = self.lists.problem.duration, found
        for _ in range(_ROUNDS):
            makespan, start = self.lists.backward(found.makespan - found.start - duration, found.reserve)
            if makespan < 0:
                break
            late = found._replace(makespan=makespan, start=makespan - start - duration)
            makespan, start = self.lists.forward(late.start, found.reserve, found.patient)
            early = late if makespan < 0 else found._replace(makespan=makespan, start=start)
            best = min(best, late, early, key=lambda order: order.makespan)
            if not 0 <= makespan < found.makespan:
                break
            found = early
        return best
