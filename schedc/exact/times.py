"""Times of one schedule as functions of costs: values at integer vectors, and the linear forms behind these.

Every start and end is a maximum, over chains of cells, of sums of costs: convex, piecewise linear and homogeneous. The
sum over a longest chain is the linear form that the time has there, and nowhere exceeds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from schedc.exact.cone import Cone, Vector, dot, minus
from schedc.exact.space import Space
from schedc.ir.arrays import Int64, bincount
from schedc.step.batch import edges
from schedc.step.cell_durations import cell_classes
from schedc.step.dependencies import Dependencies
from schedc.step.durations import sums, totals
from schedc.step.timeline import run_durations

Quantity = tuple[str, int]
"""A time: its name and its rank; rank -1 for a time of all ranks together.

makespan: the last end. idle: minus the work of the rank with least work. bubble: the sum of these two.
start, end: when a rank's first cell starts and when its last ends. work: what a rank computes.
span: the largest end - start of a rank; span_bubble: the largest end - start - work.
"""

MAKESPAN: Quantity = ("makespan", -1)
IDLE: Quantity = ("idle", -1)
BUBBLE: Quantity = ("bubble", -1)
SPAN: Quantity = ("span", -1)
SPAN_BUBBLE: Quantity = ("span_bubble", -1)

_EXACT = 1 << 53
"""Below this, doubles hold every integer."""

_WIDTH = 64
"""Vectors simulated at a time."""


@dataclass(frozen=True)
class Edges:
    """[P] start of each rank's first cell and end of its last, as integers, at one vector of costs."""

    start: list[int]
    end: list[int]


@dataclass(eq=False)
class Simulations:
    """One schedule simulated at integer vectors, each once.

    durations: [classes, coordinates] the time of a cell by its class, a linear form in the coordinates of a space.
    latency: [coordinates] the time of a message, a linear form.
    """

    dependencies: Dependencies
    classes: Int64
    durations: tuple[Vector, ...]
    latency: Vector
    _edges: dict[Vector, Edges] = field(default_factory=dict)
    _ends: dict[Vector, tuple[Any, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of vectors simulated."""
        return len(self._edges.keys() | self._ends.keys())

    @property
    def cells(self) -> int:
        """Number of cells simulated, over all vectors."""
        return len(self) * len(self.dependencies)

    @cached_property
    def _longest(self) -> int:
        """Cells of the longest chain at most: the number of levels."""
        return max(1, len(self.dependencies.levels))

    @cached_property
    def chains(self) -> tuple[Vector | None, ...]:
        """[P] the form of each rank's start where only one chain of cells leads to it; None where several do."""
        return tuple(self._chain(rank) for rank in range(self.dependencies.rank_start.size - 1))

    def _chain(self, rank: int) -> Vector | None:
        dependencies, form, own = self.dependencies, [0] * len(self.latency), False
        low, high = dependencies.rank_start[rank : rank + 2].tolist()
        cell = low if low < high else -1
        while cell >= 0:
            if own:
                form = [a + b for a, b in zip(form, self.durations[self.classes[cell]], strict=True)]
            own = True
            far: list[int] = dependencies.producers[:, cell][dependencies.remote[:, cell]].tolist()
            waits = [before for before in (*far, int(dependencies.previous[cell])) if before >= 0]
            if len(waits) > 1:
                return None
            if far:
                form = [a + b for a, b in zip(form, self.latency, strict=True)]
            cell = waits[0] if waits else -1
        return tuple(form)

    @cached_property
    def work(self) -> tuple[Vector, ...]:
        """[P] the work of each rank, a linear form."""
        dependencies = self.dependencies
        ranks, kinds = dependencies.rank_start.size - 1, len(self.durations)
        code = dependencies.rank * np.intp(kinds) + self.classes
        counts = bincount(code.astype(np.intp), minlength=ranks * kinds).reshape(ranks, kinds)
        forms = np.array(self.durations, object).reshape(kinds, -1)
        return tuple(tuple(int(c) for c in row.astype(object) @ forms) for row in counts)

    def edges(self, vectors: Iterable[Vector]) -> list[Edges]:
        """[vectors] edges of the ranks."""
        listed = list(vectors)
        missing = [v for v in dict.fromkeys(listed) if v not in self._edges]
        if len(missing) == 1:  # its form is asked for next, more often than not
            self.ends(missing.pop())
        for low in range(0, len(missing), _WIDTH):
            self._run(missing[low : low + _WIDTH])
        return [self._edges[v] for v in listed]

    def _run(self, vectors: list[Vector]) -> None:
        if not self._fits(vectors):
            for vector in vectors:
                self.ends(vector)
            return
        duration = np.array([[dot(form, v) for v in vectors] for form in self.durations], np.float64)
        latency = np.array([dot(self.latency, v) for v in vectors], np.float64)
        start, end = edges(self.dependencies, self.classes, duration, latency)
        for column, vector in enumerate(vectors):
            self._edges[vector] = Edges(
                [int(t) for t in start[:, column].tolist()], [int(t) for t in end[:, column].tolist()]
            )

    def _fits(self, vectors: Sequence[Vector]) -> bool:
        largest = max((dot(form, v) for v in vectors for form in (*self.durations, self.latency)), default=0)
        return 2 * largest * self._longest < _EXACT

    def ends(self, vector: Vector) -> tuple[Any, Any]:
        """[cells] start and end of every cell at one vector, exactly: doubles, or integers above their range."""
        if vector in self._ends:
            return self._ends[vector]
        by_class, latency = [dot(form, vector) for form in self.durations], dot(self.latency, vector)
        exact = np.float64 if self._fits([vector]) else object
        times = run_durations(self.dependencies, np.array(by_class, exact)[self.classes], latency)
        if len(self._ends) >= 8:  # one is as long as the schedule
            self._ends.pop(next(iter(self._ends)))
        self._ends[vector] = times
        if vector not in self._edges:
            dependencies = self.dependencies
            bounds = list(pairwise(dependencies.rank_start.tolist()))
            start, end = times
            self._edges[vector] = Edges(
                [int(start[low]) if low < high else 0 for low, high in bounds],
                [int(end[high - 1]) if low < high else 0 for low, high in bounds],
            )
        return times

    def chain(self, vector: Vector, cell: int, *, own: bool = True) -> Vector:
        """The form of a longest chain at a vector, up to the end of ``cell``; without ``own``, to its start."""
        dependencies = self.dependencies
        start, end = self.ends(vector)
        latency = dot(self.latency, vector)
        counts = [0] * len(self.durations)
        messages = 0
        previous, producers, remote = dependencies.previous, dependencies.producers, dependencies.remote
        while cell >= 0:
            if own:
                counts[self.classes[cell]] += 1
            own = True
            begin, before = start[cell], int(previous[cell])
            if before >= 0 and end[before] == begin:
                cell = before
                continue
            for row in (0, 1):
                producer = int(producers[row, cell])
                if producer >= 0 and remote[row, cell] and end[producer] + latency == begin:
                    messages += 1
                    cell = producer
                    break
            else:
                cell = -1
        total = [messages * c for c in self.latency]
        for count, form in zip(counts, self.durations, strict=True):
            if count:
                total = [t + count * c for t, c in zip(total, form, strict=True)]
        return tuple(total)


@dataclass(frozen=True, eq=False)
class LinearTimes:
    """The times of a schedule on a cone of costs on which the work and the start of every rank are linear.

    starts: [P] the form of each rank's start; None for a rank that no statement needs.
    """

    simulations: Simulations
    starts: tuple[Vector | None, ...]

    def values(self, quantity: Quantity, vectors: Sequence[Vector]) -> list[int]:
        """[vectors] the time at each, in the unit of the vectors."""
        edges_at = self.simulations.edges(vectors)
        return [self._value(quantity, e, vector)[0] for e, vector in zip(edges_at, vectors, strict=True)]

    def form(self, quantity: Quantity, vector: Vector) -> Vector:
        """[coordinates] a linear form that equals the time at ``vector`` and exceeds it nowhere on the cone."""
        dependencies, work = self.simulations.dependencies, self.simulations.work
        if quantity == BUBBLE:
            parts = zip(self.form(MAKESPAN, vector), self.form(IDLE, vector), strict=True)
            return tuple(a + b for a, b in parts)
        (edges,) = self.simulations.edges([vector])
        name, rank = quantity[0], self._value(quantity, edges, vector)[1]
        if name == "idle":
            return tuple(-c for c in work[rank])
        if name == "work":
            return work[rank]
        low, high = dependencies.rank_start[rank : rank + 2].tolist()
        if low == high:
            return (0,) * len(vector)
        if name == "start":
            return self.simulations.chain(vector, low, own=False)
        form = self.simulations.chain(vector, high - 1)
        if name in ("span", "span_bubble"):
            form = minus(form, self._start(rank))
        return minus(form, work[rank]) if name == "span_bubble" else form

    def _value(self, quantity: Quantity, edges: Edges, vector: Vector) -> tuple[int, int]:
        """(the time, the rank with this time)."""
        name, rank = quantity
        if name == "bubble":
            return max(edges.end) - min(self._worked(vector)), -1
        values = self._of_ranks(name, edges, vector)
        rank = values.index(max(values)) if rank < 0 else rank
        return values[rank], rank

    def _of_ranks(self, name: str, edges: Edges, vector: Vector) -> list[int]:
        """[P] the time that a quantity is about, or is the largest of."""
        if name in ("start", "end", "makespan"):
            return edges.start if name == "start" else edges.end
        spans = [end - start for start, end in zip(edges.start, edges.end, strict=True)]
        if name == "span":
            return spans
        work = self._worked(vector)
        if name == "span_bubble":
            return [span - each for span, each in zip(spans, work, strict=True)]
        return work if name == "work" else [-each for each in work]

    def even(self, quantity: Quantity, vector: Vector) -> bool:
        """Whether all ranks have the same bubble at all costs, or the same span bubble at ``vector``."""
        if quantity == BUBBLE:
            return len(set(self.simulations.work)) == 1
        (edges,) = self.simulations.edges([vector])
        return len(set(self._of_ranks("span_bubble", edges, vector))) == 1

    def _worked(self, vector: Vector) -> list[int]:
        distinct = {form: dot(form, vector) for form in set(self.simulations.work)}
        return [distinct[form] for form in self.simulations.work]

    def _start(self, rank: int) -> Vector:
        form = self.starts[rank]
        assert form is not None
        return form


def simulations_on(dependencies: Dependencies, space: Space, cone: Cone) -> list[tuple[Cone, Simulations]]:
    """The cone, cut where the time of a class of cells changes which of its sums is the longest, and its simulations.

    Such a time, as max(FB - W, F, I) of a pair with an I, is linear in each part, not in all.
    """
    groups, classes = cell_classes(dependencies, 1)
    parts: list[tuple[Cone, tuple[Vector, ...]]] = [(cone, ())]
    for group in sorted(groups, key=lambda group: int(group.cells[0])):
        longest = sums(group.first, group.second, joint=True)
        forms = [tuple(form.tolist()) for form in totals(longest, lambda key, _: np.array(space.form(key)))]
        parts = [
            (smaller, (*durations, form))
            for part, durations in parts
            for form in forms
            if (smaller := part.cut_all(minus(form, rest) for rest in forms if rest is not form)).rays
        ]
    latency = space.form("p2p")
    return [(part, Simulations(dependencies, classes, durations, latency)) for part, durations in parts]


def linear_parts(times: LinearTimes, quantity: Quantity, cone: Cone) -> list[tuple[Cone, Vector]]:
    """Parts that cover the cone, on each of which the time is the linear form beside it."""
    parts, waiting = [], [cone]
    while waiting:
        part = waiting.pop()
        form = times.form(quantity, part.interior)
        values = times.values(quantity, part.rays)
        wrong = next((r for r, v in zip(part.rays, values, strict=True) if v > dot(form, r)), None)
        if wrong is None:
            parts.append((part, form))
            continue
        border = minus(form, times.form(quantity, wrong))
        waiting += [part.cut(border), part.cut(tuple(-c for c in border))]
    return parts


def times_on(
    dependencies: Dependencies, space: Space, cone: Cone, ranks: Iterable[int] = ()
) -> list[tuple[Cone, LinearTimes]]:
    """Parts that cover the cone, with the times on each. ranks: with starts that a statement needs."""
    result = []
    for part, simulations in simulations_on(dependencies, space, cone):
        starts = {rank: simulations.chains[rank] for rank in ranks}
        count = dependencies.schedule.ranks
        split: list[tuple[Cone, Mapping[int, Vector | None]]] = [(part, starts)]
        for rank, form in starts.items():
            if form is None:
                bare = LinearTimes(simulations, (None,) * count)
                split = [
                    (smaller, {**others, rank: linear})
                    for piece, others in split
                    for smaller, linear in linear_parts(bare, ("start", rank), piece)
                ]
        for piece, forms in split:
            result.append((piece, LinearTimes(simulations, tuple(forms.get(rank) for rank in range(count)))))
    return result
