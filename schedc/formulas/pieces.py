"""Pieces of a time: a linear form in the costs, with the sizes and costs at which the time equals it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, prod
from typing import Any

import numpy as np

from schedc.exact.cone import Cone, Vector, reduced
from schedc.exact.space import Space
from schedc.formulas.fit import LinearForm, Names, Table, untested_sizes
from schedc.formulas.regions import SizeRegion


@dataclass(frozen=True, eq=False)
class Piece:
    """A time equals ``form`` . costs at the sizes of ``region``, for costs at which every condition is at least 0.

    even: whether all ranks have this value. Otherwise it is the largest over the ranks.
    proved: number of sizes at which the piece is proved for all costs that satisfy its conditions. Sizes at which
        those costs are only a border are not counted.
    largest: the largest value of each parameter among those sizes.
    share: the part of the space's costs that satisfies the conditions, at the size where that part is smallest.
    """

    form: LinearForm
    region: SizeRegion
    conditions: tuple[LinearForm, ...]
    even: bool = False
    proved: int = 0
    largest: Mapping[str, int] | None = None
    share: Fraction = Fraction(0)


@dataclass(frozen=True)
class FailedPiece:
    """Sizes and costs at which a fitted formula gives ``said`` and the simulation ``measured``, in the costs' unit.

    A count has no costs; its sizes have the rank if there is one.
    """

    form: LinearForm
    sizes: dict[str, int]
    costs: dict[str, float]
    said: float
    measured: float


@dataclass(frozen=True)
class Untried:
    """A fitted formula that no size above the fit's sizes confirms.

    names: parameters that no confirming size has larger than the fit. most: the largest value of each in the fit.
    """

    form: LinearForm
    names: tuple[str, ...]
    most: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """Sizes and costs that no piece covers, and the value there, in the costs' unit."""

    sizes: dict[str, int]
    costs: dict[str, float]
    measured: float


def coefficients(form: LinearForm, table: Table, row: int) -> tuple[Vector, int]:
    """(coefficients, scale): [symbols] the coefficients of the costs at one size, as integers, times ``scale``."""
    sizes: Any = sizes_at(table, row)  # the atoms of monomials take numbers as they take columns
    scale, terms = form.whole
    total = [0] * form.width
    for monomial, factors in terms:
        value = prod(int(atom.value(sizes)) for atom in monomial)
        total = [t + value * f for t, f in zip(total, factors, strict=True)]
    common = gcd(scale, *total)
    return tuple(t // common for t in total), scale // common


def costs_of(conditions: Sequence[LinearForm], space: Space, table: Table, row: int) -> Cone:
    """The cone of costs that satisfy conditions at one size."""
    return space.cone.cut_all(coefficients(condition, table, row)[0] for condition in conditions)


def sizes_at(table: Table, row: int) -> dict[str, int]:
    return {name: int(column[row]) for name, column in table.items()}


def readable(space: Space, vector: Vector) -> dict[str, float]:
    """The costs of a vector, rounded to six digits: an example for people, no proof."""
    small = reduced(vector)
    if max(small) <= 10_000:
        return space.costs(small)
    return {s: float(f"{x / max(small):.6g}") for s, x in space.costs(small).items()}


def inside_region(region: SizeRegion, table: Table, names: Names) -> Sequence[int]:
    """Row numbers of the sizes in a region."""
    rows: list[int] = np.flatnonzero(region.of(table, names)).tolist()
    return rows


def untried(
    forms: Sequence[LinearForm], region: SizeRegion, confirmed: Table, fitted: Table, names: Names
) -> Untried | None:
    """The finding that forms depend on ranks or microbatches, of which no confirmed row has more than the fitted ones.

    confirmed, fitted: rows of the region.
    """
    most = {name: int(fitted[name].max()) for name in names[:2]}
    if region.bounds(most[names[0]]):
        del most[names[0]]
    missing = untested_sizes(forms, confirmed, most)
    return Untried(forms[0], missing, tuple(most[name] for name in missing)) if missing else None
