"""Small whole costs at which a refuted claim may fail, to be shown instead of the vector of a proof."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt

from schedc.exact.cone import Vector
from schedc.exact.decide import Refuted
from schedc.exact.space import ONE, Space
from schedc.exact.statement import Comparison, Statement, holds_at, joint, true_at
from schedc.step.costs.keys import ZERO_SYMBOLS

_MOST_POINTS = 40_000
_BATCH = 64
_MOST_TRIED = 512
_MOST_RAYS = 8


def small_vectors(space: Space, condition: Statement, linear: Statement) -> Iterator[list[Vector]]:
    """Vectors of a space that satisfy a condition on costs, in batches, the likeliest to refute first.

    linear: the refuted statement, every time replaced by its form at the refuting vector. A vector at which it is
    false often refutes the statement too. Within each part vectors are ordered by their sum.
    """
    points = _ordered(_grid(space))
    points = points[holds_at(joint("and", (_bounds(space), condition)), points)]
    likely = ~holds_at(linear, points)
    for chosen in (points[likely], points[~likely]):
        for low in range(0, min(len(chosen), _MOST_TRIED), _BATCH):
            yield [tuple(row) for row in chosen[low : low + _BATCH].tolist()]


def near_vectors(space: Space, refuted: Refuted) -> Iterator[list[Vector]]:
    """The refuting vector in whole numbers, small sums of the rays around it, and the vector itself."""
    bounds = _bounds(space)
    yield [vector for vector in _rounded(space, refuted.vector) if true_at(bounds, vector, {})]
    sums = _sums(refuted.cone.rays[:_MOST_RAYS])
    yield [tuple(row) for row in _ordered(sums[holds_at(bounds, sums)])[:_BATCH].tolist()]
    yield [refuted.vector]


def _rounded(space: Space, vector: Vector) -> Iterator[Vector]:
    """The vector with whole costs, if the space has a unit of constants; the result may lie outside the space."""
    if space.constant:
        *costs, unit = vector
        for up in (0, unit - 1):
            least = (
                max((c + up) // unit, int(s not in ZERO_SYMBOLS)) for s, c in zip(space.symbols, costs, strict=True)
            )
            yield (*least, 1)


def _bounds(space: Space) -> Statement:
    """That a vector satisfies the bounds of a space."""
    return joint("and", tuple(Comparison(">" if bound.strict else ">=", bound.form) for bound in space.bounds))


def _grid(space: Space) -> npt.NDArray[np.int64]:
    """[points, coordinates] all vectors of small numbers, with 1 as the unit of constants."""
    free = len(space.symbols)
    most = int(_MOST_POINTS ** (1 / free) + 1e-9)
    ranges = [range(most) if symbol in ZERO_SYMBOLS else range(1, most + 1) for symbol in space.symbols]
    points = np.stack([axis.ravel() for axis in np.meshgrid(*ranges, indexing="ij")], axis=1).astype(np.int64)
    if ONE in space.coordinates:
        points = np.concatenate([points, np.ones((len(points), 1), np.int64)], axis=1)
    return points


def _sums(rays: tuple[Vector, ...]) -> npt.NDArray[np.int64]:
    """[sums, coordinates] sums of the rays, each taken 0 to 2 times."""
    if any(max(ray) >= 1 << 40 for ray in rays):
        return np.zeros((0, len(rays[0])), np.int64)  # too large for columns of integers
    counts = np.array(list(product(range(3), repeat=len(rays))), np.int64)
    return counts @ np.array(rays, np.int64)


def _ordered(points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return points[np.lexsort((points.max(axis=1, initial=0), points.sum(axis=1)))]
