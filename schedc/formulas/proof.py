"""Pieces decided for all costs at single sizes, fitted or not: what is proved there, and what is not kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from schedc.exact.cone import Vector, dot
from schedc.exact.decide import TooMany, decide
from schedc.exact.pieces import Epigraph, volume
from schedc.exact.space import Space
from schedc.exact.statement import Comparison
from schedc.exact.times import LinearTimes, Quantity
from schedc.formulas.fit import LinearForm, Table, beyond
from schedc.formulas.pieces import (
    Example,
    FailedPiece,
    Names,
    Piece,
    Untried,
    coefficients,
    costs_of,
    inside,
    readable,
    sizes_of,
)
from schedc.formulas.regimes import Regime
from schedc.formulas.regions import SizeRegion


@dataclass(frozen=True, eq=False)
class At:
    """One size at which pieces are decided: row ``row`` of ``table``."""

    table: Table
    row: int
    space: Space
    times: LinearTimes
    quantity: Quantity

    def coefficients(self, form: LinearForm) -> tuple[Vector, int]:
        return coefficients(form, self.table, self.row)

    def values(self, vectors: Sequence[Vector]) -> list[int]:
        return self.times.values(self.quantity, vectors)

    def inside(self, region: SizeRegion, names: Names) -> bool:
        """Whether the size is one of a region."""
        here = {name: column[self.row : self.row + 1] for name, column in self.table.items()}
        return bool(region.of(here, *names[:2])[0])


@dataclass(frozen=True)
class _Proof:
    """A piece at one size: the share of the costs that satisfy its conditions, 0 if they fill only a border."""

    share: Fraction
    even: bool


def prove(piece: Piece, sizes: Sequence[At], fitted: Table, names: Names) -> Piece | FailedPiece | Untried | None:
    """The piece with the sizes at which it is proved, or where it is wrong; None where it is proved at too few sizes.

    sizes: all that were looked at. fitted: the sizes of the fit. `Untried`: it depends on ranks or microbatches, and
    was not proved at more of them than it was fitted to.
    """
    proofs: list[tuple[At, _Proof]] = []
    for at in sizes:
        if not at.inside(piece.region, names):
            continue
        outcome = _prove_at(piece, at)
        if isinstance(outcome, FailedPiece):
            return outcome
        if outcome.share:
            proofs.append((at, outcome))
    if len(proofs) < max(2 * len(piece.form.terms), _LEAST):
        return None
    table = {name: [int(at.table[name][at.row]) for at, _ in proofs] for name in fitted}
    if untried := _beyond(piece, table, fitted, names):
        return untried
    return replace(
        piece,
        even=all(proof.even for _, proof in proofs),
        proved=len(proofs),
        largest={name: max(values) for name, values in table.items()},
        share=min(proof.share for _, proof in proofs),
    )


_LEAST = 8
"""Sizes at which a piece must be proved to be kept."""


def _prove_at(piece: Piece, at: At) -> _Proof | FailedPiece:
    cone = costs_of(piece.conditions, at.space, at.table, at.row)
    vector, scale = at.coefficients(piece.form)
    share = volume(cone) / volume(at.space.cone) if cone.rays else Fraction(0)
    if not share:
        # no costs, or a border: nothing is said there, but a form above the time would not be one of its pieces
        above = _above(vector, scale, at)
        return _failure(piece.form, at, above) if above else _Proof(share, True)
    # the time is convex: nowhere above the form, which is it at one point inside, is equal to the form
    vectors = [cone.interior, *cone.rays]
    values = at.values(vectors)
    if dot(vector, cone.interior) != scale * values[0]:
        return _failure(piece.form, at, cone.interior)
    if wrong := next((r for r, v in zip(vectors, values, strict=True) if scale * v != dot(vector, r)), None):
        return _failure(piece.form, at, _near(wrong, cone.interior, vector, scale, at))
    return _Proof(share, at.times.even(at.quantity, cone.interior))


def _near(ray: Vector, point: Vector, form: Vector, scale: int, at: At) -> Vector:
    """A vector inside of the costs at which a form is wrong, near a ray at which it is."""
    factor = 1
    while True:
        near = tuple(factor * a + b for a, b in zip(ray, point, strict=True))
        if dot(form, near) != scale * at.values([near])[0]:
            return near
        factor *= 10


def _above(vector: Vector, scale: int, at: At) -> Vector | None:
    """Costs at which a form exceeds the time, if there are any."""
    claim = Comparison(">=", tuple(-c for c in vector), ((at.quantity, scale),))
    try:
        refuted = decide(claim, at.space.cone, at.times)
    except TooMany:
        return at.space.cone.interior
    return refuted.vector if refuted else None


def _failure(form: LinearForm, at: At, vector: Vector) -> FailedPiece:
    coefficients, scale = at.coefficients(form)
    (measured,) = at.values([vector])
    costs = readable(at.space, vector)
    unit = next(iter(costs.values())) / vector[0]
    said = dot(coefficients, vector) / scale
    return FailedPiece(form, sizes_of(at.table, at.row), costs, said * unit, measured * unit)


def _beyond(piece: Piece, proved: Mapping[str, list[int]], fitted: Table, names: Names) -> Untried | None:
    rows = inside(piece.region, fitted, names)
    most = {name: int(fitted[name][rows].max()) for name in names[:2]}
    if piece.region.bounds(most[names[0]]):
        del most[names[0]]
    table = {name: np.array(values, np.int64) for name, values in proved.items()}
    missing = beyond((piece.form,), table, most)
    return Untried(piece.form, missing, tuple(most[name] for name in missing)) if missing else None


# Whether pieces leave something out.


def complete_at(forms: Sequence[LinearForm], at: At) -> bool:
    """Whether the time is the largest of the forms for all costs of the space, at one size."""
    exact = [at.coefficients(form) for form in forms]
    if any(scale != 1 for _, scale in exact):
        return False
    bounds = [bound.form for bound in at.space.bounds[at.space.dimension :]]
    epigraph = Epigraph.over(at.space.cone, bounds, list(dict.fromkeys(vector for vector, _ in exact)))
    points = [region.interior for region in epigraph.regions.values()]
    heights = [dot(form, point) for form, point in zip(epigraph.regions, points, strict=True)]
    values = at.values([*epigraph.points, *points])
    # nowhere above it, by the rays; nowhere below, by the points inside of the pieces
    return (
        all(v <= z for v, z in zip(values, [*epigraph.heights, *heights], strict=True))
        and values[len(epigraph.points) :] == heights
    )


def complete_in(regime: Regime, kept: Sequence[Piece], sizes: Sequence[At], names: Names) -> bool:
    """Whether the kept pieces of a regime leave nothing out, at any size of its region that was looked at."""
    forms = [piece.form for piece in kept if piece.region is regime.region]
    there = [at for at in sizes if at.inside(regime.region, names)]
    return bool(forms) and bool(there) and all(complete_at(forms, at) for at in there)


def left_out(pieces: Sequence[Piece], sizes: Sequence[At], vectors: Sequence[Vector], names: Names) -> Example | None:
    """A value that no piece speaks of, at the smallest size that has one."""
    for at in sorted(sizes, key=lambda at: [int(at.table[name][at.row]) for name in names[:2]]):
        cones = [
            [at.coefficients(condition)[0] for condition in piece.conditions]
            for piece in pieces
            if at.inside(piece.region, names)
        ]
        for vector in vectors:
            if not any(all(dot(condition, vector) >= 0 for condition in conditions) for conditions in cones):
                (value,) = at.values([vector])
                costs = readable(at.space, vector)
                return Example(sizes_of(at.table, at.row), costs, value * next(iter(costs.values())) / vector[0])
    return None
