"""Pieces decided for all costs at each size, fitted or held out; a piece that fails at one is not kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from schedc.exact.cone import Vector, dot
from schedc.exact.decide import TooMany, decide
from schedc.exact.pieces import Epigraph, volume
from schedc.exact.space import Space
from schedc.exact.statement import Comparison
from schedc.exact.times import LinearTimes, Quantity
from schedc.formulas.fit import LinearForm, Names, Table, chosen_rows
from schedc.formulas.measure import MeasuredTimes
from schedc.formulas.pieces import (
    Example,
    FailedPiece,
    Piece,
    Untried,
    coefficients,
    costs_of,
    inside_region,
    readable,
    sizes_at,
    untried,
)
from schedc.formulas.regimes import Regime
from schedc.formulas.regions import SizeRegion


@dataclass(frozen=True, eq=False)
class DecidedSize:
    """A size at which pieces are decided: row ``row`` of ``table``, with its times.

    measured: the time in all its pieces, where they are known; it answers in place of simulations.
    """

    table: Table
    row: int
    space: Space
    times: LinearTimes
    quantity: Quantity
    measured: MeasuredTimes | None = None

    def coefficients(self, form: LinearForm) -> tuple[Vector, int]:
        return coefficients(form, self.table, self.row)

    def values(self, vectors: Sequence[Vector]) -> list[int]:
        if self.measured is not None:
            return [self.measured.value(vector) for vector in vectors]
        return self.times.values(self.quantity, vectors)

    def inside(self, region: SizeRegion, names: Names) -> bool:
        """Whether the size is in a region."""
        return bool(region.of(chosen_rows(self.table, [self.row]), names)[0])


@dataclass(frozen=True)
class _Proof:
    """A piece proved at one size. share: the part of the costs that satisfies its conditions; 0 for a mere border."""

    share: Fraction
    even: bool


def prove(
    piece: Piece, sizes: Sequence[DecidedSize], fitted: Table, names: Names
) -> Piece | FailedPiece | Untried | None:
    """The piece with the sizes at which it is proved, or where it fails; None where it is proved at too few sizes.

    sizes: all that are looked at. fitted: columns of the fitted sizes. `Untried`: the piece depends on ranks or
    microbatches, and is not proved at more of them than it was fitted to.
    """
    proofs: list[tuple[DecidedSize, _Proof]] = []
    for size in sizes:
        if not size.inside(piece.region, names):
            continue
        outcome = _prove_at(piece, size)
        if isinstance(outcome, FailedPiece):
            return outcome
        if outcome.share:
            proofs.append((size, outcome))
    if len(proofs) < max(2 * len(piece.form.terms), _LEAST):
        return None
    table = {name: np.array([size.table[name][size.row] for size, _ in proofs]) for name in fitted}
    there = chosen_rows(fitted, inside_region(piece.region, fitted, names))
    if missing := untried((piece.form,), piece.region, table, there, names):
        return missing
    return replace(
        piece,
        even=all(proof.even for _, proof in proofs),
        proved=len(proofs),
        largest={name: int(values.max()) for name, values in table.items()},
        share=min(proof.share for _, proof in proofs),
    )


_LEAST = 8
"""Sizes at which a piece must be proved to be kept."""


def _prove_at(piece: Piece, size: DecidedSize) -> _Proof | FailedPiece:
    cone = costs_of(piece.conditions, size.space, size.table, size.row)
    vector, scale = size.coefficients(piece.form)
    share = volume(cone) / volume(size.space.cone) if cone.rays else Fraction(0)
    if not share:
        # No costs, or a border: the piece claims nothing there. But a form above the time is no piece of it.
        above = _above(vector, scale, size)
        return _failure(piece.form, size, above) if above else _Proof(share, True)
    # The time is convex. It equals the form at one point inside and at the rays, hence everywhere between.
    vectors = [cone.interior, *cone.rays]
    values = size.values(vectors)
    if dot(vector, cone.interior) != scale * values[0]:
        return _failure(piece.form, size, cone.interior)
    if wrong := next((r for r, v in zip(vectors, values, strict=True) if scale * v != dot(vector, r)), None):
        differs = lambda x, time: dot(vector, x) != scale * time  # noqa: E731
        return _failure(piece.form, size, _near(wrong, cone.interior, differs, size))
    return _Proof(share, size.times.even(size.quantity, cone.interior))


def _near(ray: Vector, point: Vector, fails: Callable[[Vector, int], bool], size: DecidedSize) -> Vector:
    """A vector inside the cone at which a form fails, near a ray at which it fails. fails: of a vector and its time."""
    factor = 1
    while True:
        near = tuple(factor * a + b for a, b in zip(ray, point, strict=True))
        if fails(near, size.values([near])[0]):
            return near
        factor *= 10


def _above(vector: Vector, scale: int, size: DecidedSize) -> Vector | None:
    """Costs at which a form exceeds the time; None if it never does."""
    if size.measured is not None:  # the time is linear between the points of its epigraph
        epigraph = size.measured.epigraph
        points = zip(epigraph.points, epigraph.heights, strict=True)
        higher = next((point for point, height in points if dot(vector, point) > scale * height), None)
        return higher and _near(higher, size.space.cone.interior, lambda x, time: dot(vector, x) > scale * time, size)
    claim = Comparison(">=", tuple(-c for c in vector), ((size.quantity, scale),))
    try:
        refuted = decide(claim, size.space.cone, size.times)
    except TooMany:
        return size.space.cone.interior
    return refuted.vector if refuted else None


def _failure(form: LinearForm, size: DecidedSize, vector: Vector) -> FailedPiece:
    coefficients, scale = size.coefficients(form)
    (measured,) = size.values([vector])
    costs = readable(size.space, vector)
    unit = next(iter(costs.values())) / vector[0]
    said = dot(coefficients, vector) / scale
    return FailedPiece(form, sizes_at(size.table, size.row), costs, said * unit, measured * unit)


# Completeness of the pieces.


def complete_at(forms: Sequence[LinearForm], size: DecidedSize) -> bool:
    """Whether the time equals the largest of the forms for all costs of the space, at one size."""
    exact = [size.coefficients(form) for form in forms]
    if any(scale != 1 for _, scale in exact):
        return False
    bounds = [bound.form for bound in size.space.bounds[size.space.dimension :]]
    epigraph = Epigraph.over(size.space.cone, bounds, list(dict.fromkeys(vector for vector, _ in exact)))
    points = [region.interior for region in epigraph.regions.values()]
    heights = [dot(form, point) for form, point in zip(epigraph.regions, points, strict=True)]
    values = size.values([*epigraph.points, *points])
    # The time exceeds the largest form nowhere (rays), and is below it nowhere (points inside the pieces).
    return (
        all(v <= z for v, z in zip(values, [*epigraph.heights, *heights], strict=True))
        and values[len(epigraph.points) :] == heights
    )


def complete_in(regime: Regime, kept: Sequence[Piece], sizes: Sequence[DecidedSize], names: Names) -> bool:
    """Whether the kept pieces of a regime are complete at every size of its region that is looked at."""
    forms = [piece.form for piece in kept if piece.region is regime.region]
    there = [size for size in sizes if size.inside(regime.region, names)]
    return bool(forms) and bool(there) and all(complete_at(forms, size) for size in there)


def left_out(
    pieces: Sequence[Piece], sizes: Sequence[DecidedSize], vectors: Sequence[Vector], names: Names
) -> Example | None:
    """A value that no piece covers, at the smallest size that has one."""
    for size in sorted(sizes, key=lambda size: [int(size.table[name][size.row]) for name in names[:2]]):
        cones = [
            [size.coefficients(condition)[0] for condition in piece.conditions]
            for piece in pieces
            if size.inside(piece.region, names)
        ]
        for vector in vectors:
            if not any(all(dot(condition, vector) >= 0 for condition in conditions) for conditions in cones):
                (value,) = size.values([vector])
                costs = readable(size.space, vector)
                return Example(sizes_at(size.table, size.row), costs, value * next(iter(costs.values())) / vector[0])
    return None
