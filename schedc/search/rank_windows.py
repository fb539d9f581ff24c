"""Bounds when cells can run more tightly than paths do: a rank runs the cells before a cell one by one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Bools, Int64
from schedc.search.bounds import OpWindows


@dataclass(frozen=True, eq=False)
class RankWindows:
    """Earliest starts and least times behind ends, from paths and from ranks that run one cell at a time.

    head: a cell starts when all cells of its rank that it follows from have ended. Of those with a head of h or more,
    the last ends at h plus their work or later (Carlier, EJOR 11, 1982). tail: the same, seen from the end.
    """

    windows: OpWindows

    @cached_property
    def head(self) -> Int64:
        """[cells] ticks before which a cell cannot start."""
        return self._least(self.windows.order, self.windows.followed)

    @cached_property
    def tail(self) -> Int64:
        """[cells] ticks that must follow the end of a cell."""
        return self._least(self.windows.order[::-1], self.windows.following)

    def _least(self, order: list[int], linked: list[list[tuple[int, int]]]) -> Int64:
        """[cells] the heads, or the tails with arcs and order reversed."""
        problem = self.windows.problem
        rank, duration = problem.dependencies.rank, problem.duration
        least = np.zeros(len(problem), np.int64)
        behind: Bools = np.zeros((len(problem), len(problem)), bool)
        for cell in order:
            for other, lag in linked[cell]:
                least[cell] = max(least[cell], least[other] + duration[other] + lag)
                behind[cell] |= behind[other]
                behind[cell, other] = True
            own = np.flatnonzero(behind[cell] & (rank == rank[cell]))
            if own.size:
                own = own[np.argsort(-least[own], kind="stable")]
                least[cell] = max(least[cell], int((least[own] + np.cumsum(duration[own])).max()))
        return least
