"""Bounds when every cell can run, and computes from this a lower bound of the objective without a search."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Int64, bincount
from schedc.search.problem import SearchProblem


@dataclass(frozen=True, eq=False)
class OpWindows:
    """The arcs of a problem from both ends; earliest starts and latest ends of the cells, as far as arcs imply them."""

    problem: SearchProblem

    @cached_property
    def following(self) -> list[list[tuple[int, int]]]:
        """[cells] pairs (cell, lag) of the cells that start after a cell. Lags are in ticks."""
        return self._linked(self.problem.before, self.problem.after)

    @cached_property
    def followed(self) -> list[list[tuple[int, int]]]:
        """[cells] pairs (cell, lag) of the cells that a cell starts after. Lags are in ticks."""
        return self._linked(self.problem.after, self.problem.before)

    def _linked(self, cells: Int64, others: Int64) -> list[list[tuple[int, int]]]:
        linked: list[list[tuple[int, int]]] = [[] for _ in range(len(self.problem))]
        for cell, other, lag in zip(cells.tolist(), others.tolist(), self.problem.lag.tolist(), strict=True):
            linked[cell].append((other, lag))
        return linked

    def sorted(self, priority: list[tuple[int, ...]]) -> list[int]:
        """[cells] all cells in an order that respects the arcs; the possible cell of least ``priority`` goes first.

        Shorter than the number of cells if the arcs contain a circle.
        """
        missing = [len(before) for before in self.followed]
        ready = [(priority[cell], cell) for cell, count in enumerate(missing) if not count]
        heapify(ready)
        order = []
        while ready:
            _, cell = heappop(ready)
            order.append(cell)
            for after, _ in self.following[cell]:
                missing[after] -= 1
                if not missing[after]:
                    heappush(ready, (priority[after], after))
        return order

    @cached_property
    def order(self) -> list[int]:
        """[cells] in an order that respects the arcs."""
        order = self.sorted([()] * len(self.problem))
        if len(order) < len(self.problem):
            raise CompilerBug("search", "the arcs contain a circle, so no order exists; this is refused earlier")
        return order

    @cached_property
    def head(self) -> Int64:
        """[cells] ticks before which a cell cannot start."""
        duration, head = self.problem.duration.tolist(), [0] * len(self.problem)
        for cell in self.order:
            head[cell] = max((head[b] + duration[b] + lag for b, lag in self.followed[cell]), default=0)
        return np.array(head, np.int64)

    @cached_property
    def tail(self) -> Int64:
        """[cells] ticks that must follow the end of a cell."""
        duration, tail = self.problem.duration.tolist(), [0] * len(self.problem)
        for cell in reversed(self.order):
            tail[cell] = max((tail[a] + duration[a] + lag for a, lag in self.following[cell]), default=0)
        return np.array(tail, np.int64)

    @cached_property
    def first(self) -> Int64 | None:
        """[P] the cell that starts first on each rank, at its head, in every order; None if a rank has no such cell.

        Every other cell of the rank must follow from it, and it may wait only for such first cells of other ranks.
        """
        start = self.problem.dependencies.rank_start
        if (start[:-1] == start[1:]).any():
            return None
        ranks = [range(low, high) for low, high in pairwise(start.tolist())]
        first = [min(cells, key=self.head.__getitem__) for cells in ranks]
        for cell, cells in zip(first, ranks, strict=True):
            if not self._after(cell).issuperset(cells):
                return None
        waits = {before for cell in first for before, _ in self.followed[cell]}
        return np.array(first, np.int64) if waits <= set(first) else None

    def _after(self, cell: int) -> set[int]:
        """The cell and all cells that follow from it, directly or not."""
        reached, pending = {cell}, [cell]
        while pending:
            for after, _ in self.following[pending.pop()]:
                if after not in reached:
                    reached.add(after)
                    pending.append(after)
        return reached


def combinatorial_bound(windows: OpWindows, objective: str) -> int:
    """Ticks that no order of the problem can undercut.

    objective "span": the work of the busiest rank.
    objective "makespan": the largest of two bounds. (1) The longest chain of arcs. (2) For each rank, the shortest time
    of one machine that runs the rank's cells between their heads and tails and may interrupt them. It is the largest,
    over sets of cells, of the least head plus all durations plus the least tail (Carlier, EJOR 11, 1982). It is left
    out where pairs may be made, which take less than their ops.
    """
    problem, dependencies = windows.problem, windows.problem.dependencies
    if objective == "span":
        return int(bincount(dependencies.rank, problem.duration).max(initial=0))
    longest = int((windows.head + problem.duration + windows.tail).max(initial=0))
    if problem.gain.any():
        return longest
    return max([longest, *(_one_machine(windows, rank) for rank in range(dependencies.rank_start.size - 1))])


def _one_machine(windows: OpWindows, rank: int) -> int:
    """The bound (2) for one rank, in ticks. It suffices to try sets of cells with at least some head and some tail."""
    problem, start = windows.problem, windows.problem.dependencies.rank_start
    cells = np.arange(start[rank], start[rank + 1])
    cells = cells[np.argsort(windows.head[cells], kind="stable")]
    head, tail, duration = windows.head[cells], windows.tail[cells], problem.duration[cells]
    best = 0
    for least in np.unique(tail).tolist():
        chosen = tail >= least
        work = np.cumsum(duration[chosen][::-1])[::-1]
        best = max(best, int((head[chosen] + work).max()) + least)
    return best
