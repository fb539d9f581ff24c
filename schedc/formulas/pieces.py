"""Pieces of a time over all sizes: a linear form in the costs, and the sizes and costs at which it is the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, prod
from typing import Any

from schedc.exact.cone import Cone, Vector, reduced
from schedc.exact.space import Space
from schedc.formulas.fit import LinearForm, Table
from schedc.formulas.regions import SizeRegion

Names = tuple[str, str, tuple[str, ...]]
"""The parameters of a schedule: ranks, microbatches, others."""


@dataclass(frozen=True, eq=False)
class Piece:
    """``form`` . costs, at sizes of ``region`` and where every condition, itself a form, is at least 0.

    even: whether all ranks have this value; else it is the largest over the ranks.
    proved: at how many sizes it was proved for all costs that satisfy the conditions, if such costs fill more than a
    border. largest: the largest value of each parameter among those sizes. share: of all costs of the space, those that
    satisfy the conditions, at the size where they are fewest.
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
    """Where a fitted formula was found wrong: it said one thing, the simulation another."""

    form: LinearForm
    sizes: dict[str, int]
    costs: dict[str, float]
    said: float
    measured: float


@dataclass(frozen=True)
class Untried:
    """A fitted formula that was right wherever it was looked at, but at no size above those that it was fitted to.

    names: those sizes; most: the largest of each.
    """

    form: LinearForm
    names: tuple[str, ...]
    most: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """One value that no piece speaks of."""

    sizes: dict[str, int]
    costs: dict[str, float]
    measured: float


def coefficients(form: LinearForm, table: Table, row: int) -> tuple[Vector, int]:
    """(integers, scale): the coefficients of the costs at one size, times a scale."""
    sizes: Any = sizes_of(table, row)  # the atoms of monomials take numbers as they take columns
    scale, terms = form.whole
    total = [0] * form.width
    for monomial, factors in terms:
        value = prod(int(atom.value(sizes)) for atom in monomial)
        total = [t + value * f for t, f in zip(total, factors, strict=True)]
    common = gcd(scale, *total)
    return tuple(t // common for t in total), scale // common


def costs_of(conditions: Sequence[LinearForm], space: Space, table: Table, row: int) -> Cone:
    """The costs that satisfy conditions at one size."""
    return space.cone.cut_all(coefficients(condition, table, row)[0] for condition in conditions)


def sizes_of(table: Table, row: int) -> dict[str, int]:
    return {name: int(column[row]) for name, column in table.items()}


def readable(space: Space, vector: Vector) -> dict[str, float]:
    """The costs of a vector, rounded to a few digits: an example, no proof."""
    small = reduced(vector)
    if max(small) <= 10_000:
        return space.costs(small)
    return {s: float(f"{x / max(small):.6g}") for s, x in space.costs(small).items()}


def inside(region: SizeRegion, table: Table, names: Names) -> Sequence[int]:
    """The rows of the sizes of a region."""
    return [row for row, there in enumerate(region.of(table, *names[:2]).tolist()) if there]
