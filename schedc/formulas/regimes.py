"""Linear forms of a time over the sizes: quasi-polynomials fitted to the exact pieces at each size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedc.exact.cone import Vector, dot
from schedc.exact.pieces import volume
from schedc.formulas.fit import LinearForm, Monomial, Names, Table, chosen_rows, families, fit
from schedc.formulas.measure import MeasuredTimes
from schedc.formulas.pieces import coefficients, inside_region
from schedc.formulas.regions import REGIONS, REMAINDERS, SizeRegion
from schedc.ir.arrays import Floats

_LEAST_SIZES = 8
"""Sizes that a region needs to be considered."""

_SIZES_OF_DIRECTIONS = 14
"""Number of sizes whose pieces give the directions that are followed over all sizes."""

_BETTER = 0.02
"""Share of the costs that a narrower region must explain beyond a wider one to be preferred."""

_NEAR = 1e-7
"""How far directions are moved off symmetric places, relative to their sum."""


@dataclass(frozen=True, eq=False)
class Regime:
    """Forms that a time takes at the sizes of a region, and never exceeds. complete: whether it takes no other."""

    region: SizeRegion
    forms: tuple[LinearForm, ...]
    complete: bool


def find_regimes(rows: Sequence[MeasuredTimes], table: Table, names: Names, *, remainders: bool) -> list[Regime]:
    """The first region of sizes in which all pieces are fitted, else the region in which most are.

    With ``remainders``, the same for the sizes outside that region.
    """
    first = _best(rows, table, names, REGIONS)
    if first is None:
        return []
    regimes = [first]
    covered = set(inside_region(first.region, table, names))
    while remainders and first.region.texts:
        rest = [r for r in REMAINDERS if not covered & set(inside_region(r, table, names))]
        other = _best(rows, table, names, rest)
        if other is None:
            break
        regimes.append(other)
        covered |= set(inside_region(other.region, table, names))
    return regimes


def _best(rows: Sequence[MeasuredTimes], table: Table, names: Names, regions: Sequence[SizeRegion]) -> Regime | None:
    monomials = list(families(names))
    best: tuple[float, Regime] | None = None
    for number, region in enumerate(regions):
        chosen = inside_region(region, table, names)
        if len(chosen) < _LEAST_SIZES or (best is not None and region.texts and len(chosen) == len(rows)):
            continue
        part, columns = _rows(rows, table, chosen)
        forms = _forms(part, columns, monomials)
        if not forms:
            continue
        explained = _explained(part, columns, forms)
        regime = Regime(region, forms, explained == 1.0)
        if regime.complete:
            return _widened(regime, rows, table, names, regions[:number])
        if best is None or explained > best[0] + _BETTER:
            best = explained, regime
    return None if best is None else best[1]


def _widened(
    regime: Regime, rows: Sequence[MeasuredTimes], table: Table, names: Names, wider: Sequence[SizeRegion]
) -> Regime:
    """The regime in the first wider region in which its forms are all pieces as well; else as it is.

    In the wider region itself the fit may fail: a direction may pass from one piece to another at a few sizes.
    """
    own = set(inside_region(regime.region, table, names))
    for region in wider:
        chosen = inside_region(region, table, names)
        part, columns = _rows(rows, table, chosen)
        below = own < set(chosen) and all(_below(form, part, columns) for form in regime.forms)
        if below and _explained(part, columns, regime.forms) == 1.0:
            return Regime(region, regime.forms, True)
    return regime


def _rows(rows: Sequence[MeasuredTimes], table: Table, chosen: Sequence[int]) -> tuple[list[MeasuredTimes], Table]:
    return [rows[i] for i in chosen], chosen_rows(table, chosen)


def _explained(rows: Sequence[MeasuredTimes], table: Table, forms: Sequence[LinearForm]) -> float:
    """Share of the costs at which the time equals some form, averaged over the sizes; 1.0 only if it is all of them."""
    shares = []
    for row, measured in enumerate(rows):
        vectors = {_vector(form, table, row) for form in forms}
        left = [region for form, region in measured.pieces.items() if form not in vectors]
        total = volume(measured.space.cone)
        shares.append(1.0 if not left else 1.0 - float(sum(map(volume, left)) / total))
    return 1.0 if min(shares) == 1.0 else min(float(np.mean(shares)), 0.9999)


def _vector(form: LinearForm, table: Table, row: int) -> Vector | None:
    """[symbols] coefficients at one size; None where they are not integers."""
    vector, scale = coefficients(form, table, row)
    return vector if scale == 1 else None


def _forms(rows: Sequence[MeasuredTimes], table: Table, families: list[list[Monomial]]) -> tuple[LinearForm, ...]:
    """Forms fitted to the pieces in some direction of the costs over all sizes, and exceeding the time nowhere."""
    directions = _directions(rows)
    sequences = np.stack([measured.matrix[np.argmax(measured.matrix @ directions.T, axis=0)] for measured in rows])
    forms: dict[LinearForm, None] = {}
    left = np.unique(sequences.transpose(1, 0, 2), axis=0).transpose(1, 0, 2)
    for monomials in families:
        fitted = fit(left, table, monomials)
        forms |= {form: None for form in fitted if form is not None and _below(form, rows, table)}
        left = left[:, [form is None for form in fitted]]
        if not left.shape[1]:
            break
    return tuple(forms)


def _directions(rows: Sequence[MeasuredTimes]) -> Floats:
    """[K, symbols] a point inside each piece of some of the sizes, moved off symmetric places."""
    step = max(1, len(rows) // _SIZES_OF_DIRECTIONS)
    points = [region.interior for measured in rows[::step] for region in measured.pieces.values()]
    listed = np.array([[float(x) for x in point] for point in points])
    listed /= listed.sum(axis=1, keepdims=True)
    space = rows[0].space
    skew = sum((1 + i / 7) * np.array(ray, np.float64) / sum(ray) for i, ray in enumerate(space.cone.rays))
    return np.asarray(np.unique(np.round(listed, 9), axis=0) + _NEAR * skew)


def _below(form: LinearForm, rows: Sequence[MeasuredTimes], table: Table) -> bool:
    """Whether the form exceeds the time nowhere, at any size."""
    for row, measured in enumerate(rows):
        vector, scale = coefficients(form, table, row)
        epigraph = measured.epigraph
        if any(dot(vector, x) > scale * z for x, z in zip(epigraph.points, epigraph.heights, strict=True)):
            return False
    return True
