"""What a schedule takes at one size: times in all their linear pieces, and counts of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.memory import measure_memory
from schedc.exact.cone import Cone, Vector, dot
from schedc.exact.pieces import Epigraph, linear_pieces
from schedc.exact.space import Space
from schedc.exact.times import BUBBLE, SPAN_BUBBLE, Kinds, Quantity, Times, times_on
from schedc.ir.schedule import Int64

Floats = npt.NDArray[np.float64]

TIMES: dict[str, Quantity] = {"bubble": BUBBLE, "span_bubble": SPAN_BUBBLE}
_PEAKS = ("peak_activations", "peak_activations_between", "peak_pending_weight")
COUNTS = (*_PEAKS, "messages_sent")
TOTALS = ("messages", "busiest_link")


def times_at(cells: Dependencies, space: Space) -> Times | None:
    """The times of one size; None where they are not convex in the costs of the space.

    That is so where an overlapped pair has an I, or where two chains of cells lead to the start of a rank.
    """
    parts = times_on(Kinds.of(cells), space, space.cone, range(cells.schedule.ranks))
    return parts[0][1] if len(parts) == 1 else None


@dataclass(frozen=True, eq=False)
class Measured:
    """One time at one size in all its linear pieces.

    space: the costs; epigraph: of the time over them.
    """

    space: Space
    times: Times
    quantity: Quantity
    epigraph: Epigraph

    @cached_property
    def pieces(self) -> dict[Vector, Cone]:
        """Every linear form that the time has, with where it has it."""
        return self.epigraph.regions

    @cached_property
    def matrix(self) -> Floats:
        """[pieces, symbols]"""
        return np.array(list(self.pieces), np.float64)

    def value(self, vector: Vector) -> int:
        return max(dot(form, vector) for form in self.pieces)


def measured(times: Times, space: Space, quantity: Quantity, most: int) -> Measured | None:
    """All linear pieces of a time; None where there are more than ``most``."""
    bounds = [bound.form for bound in space.bounds[space.dimension :]]
    epigraph = linear_pieces(times, quantity, space.cone, bounds, most)
    return None if epigraph is None else Measured(space, times, quantity, epigraph)


def counts(cells: Dependencies) -> dict[str, Int64]:
    """By name [P] the counts of `COUNTS`, and [1] those of `TOTALS`, at one size. All are plain numbers."""
    memory = measure_memory(cells.schedule, dependencies=cells)
    sent = _messages(cells)
    peaks: dict[str, Int64] = {name: getattr(memory, name) for name in _PEAKS}
    link = (sent + sent.T).max(keepdims=True)[0]
    return {**peaks, "messages_sent": sent.sum(axis=1), "messages": sent.sum(keepdims=True)[0], "busiest_link": link}


def _messages(cells: Dependencies) -> Int64:
    """[P, P] messages of a step from each rank to each: activations and gradients together."""
    ranks = cells.schedule.ranks
    table = np.zeros((ranks, ranks), np.int64)
    for producer, remote in zip(cells.producers, cells.remote, strict=True):
        np.add.at(table, (cells.rank[producer[remote]], cells.rank[remote]), 1)
    return table
