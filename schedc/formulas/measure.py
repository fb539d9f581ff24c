"""Times of a schedule at one size, in all their linear pieces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.exact.cone import Cone, Vector, dot
from schedc.exact.pieces import Epigraph, linear_pieces
from schedc.exact.space import Space
from schedc.exact.times import BUBBLE, SPAN_BUBBLE, LinearTimes, Quantity, times_on
from schedc.ir.arrays import Floats
from schedc.step.dependencies import Dependencies

TIMES: dict[str, Quantity] = {"bubble": BUBBLE, "span_bubble": SPAN_BUBBLE}


def times_at(cells: Dependencies, space: Space) -> LinearTimes | None:
    """The times at one size, as linear forms in the costs; None where they are not convex in the costs of the space.

    Times are not convex where an overlapped pair has an I, or where two chains of cells lead to a rank's first cell.
    """
    parts = times_on(cells, space, space.cone, range(cells.schedule.ranks))
    return parts[0][1] if len(parts) == 1 else None


@dataclass(frozen=True, eq=False)
class MeasuredTimes:
    """A time at a size, in all linear pieces. epigraph: that of the time over the costs of ``space``."""

    space: Space
    epigraph: Epigraph

    @cached_property
    def pieces(self) -> dict[Vector, Cone]:
        """Each linear form of the time, with the costs at which the time equals it."""
        return self.epigraph.regions

    @cached_property
    def matrix(self) -> Floats:
        """[pieces, symbols] coefficients."""
        return np.array(list(self.pieces), np.float64)

    def value(self, vector: Vector) -> int:
        return max(dot(form, vector) for form in self.pieces)


def measured(times: LinearTimes, space: Space, quantity: Quantity, most: int) -> MeasuredTimes | None:
    """All linear pieces of a time; None where there are more than ``most`` of them."""
    bounds = [bound.form for bound in space.bounds[space.dimension :]]
    epigraph = linear_pieces(times, quantity, space.cone, bounds, most)
    return None if epigraph is None else MeasuredTimes(space, epigraph)
