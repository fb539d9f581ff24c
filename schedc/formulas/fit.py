"""Exact quasi-polynomials in the sizes: the monomials that are tried, and the fit of integer tables to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from math import lcm
from typing import Any

import numpy as np

from schedc.ir.arrays import Floats, Int64

Table = Mapping[str, Int64]
"""[n] columns by name: the sizes, and ``r`` in a table with a row per rank."""

Names = Sequence[str]
"""Names of a schedule's parameters: ranks, microbatches, others."""

LARGEST_DENOMINATOR = 24
SPARE = 2
"""Rows per coefficient that a fit needs. Rows beyond the coefficients confirm the fit."""


@dataclass(frozen=True, eq=False)
class Atom:
    """A factor of monomials. text, latex: how it is printed. value: [n] its values, from the columns of a table."""

    text: str
    latex: str
    value: Callable[[Table], Int64]
    rank: bool = False
    """Whether it depends on the rank."""
    of: str = ""
    """The only column that it depends on; empty where there are several."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


Monomial = tuple[Atom, ...]
"""A product of atoms; the empty one is 1."""


@dataclass(frozen=True)
class LinearForm:
    """One quasi-polynomial in the sizes per symbol: ``terms[monomial][symbol]``. A count has one symbol.

    width: number of symbols. A form without terms is 0.
    """

    terms: tuple[tuple[Monomial, tuple[Fraction, ...]], ...]
    width: int = 1

    def at(self, table: Table) -> Floats:
        """[n, symbols] coefficients at every row."""
        rows = len(next(iter(table.values())))
        total = np.zeros((rows, self.width))
        for monomial, factors in self.terms:
            total += monomial_values(monomial, table)[:, None] * np.array([float(f) for f in factors])
        return total

    @cached_property
    def whole(self) -> tuple[int, tuple[tuple[Monomial, tuple[int, ...]], ...]]:
        """(scale, terms): the terms times ``scale``, in whole numbers."""
        scale = lcm(*(f.denominator for _, factors in self.terms for f in factors))
        return scale, tuple((monomial, tuple(int(f * scale) for f in factors)) for monomial, factors in self.terms)

    def minus(self, other: LinearForm) -> LinearForm:
        mine, theirs = dict(self.terms), dict(other.terms)
        zero = (Fraction(0),) * self.width
        merged = {
            monomial: tuple(a - b for a, b in zip(mine.get(monomial, zero), theirs.get(monomial, zero), strict=True))
            for monomial in (*mine, *(m for m in theirs if m not in mine))
        }
        return LinearForm(tuple((m, factors) for m, factors in merged.items() if any(factors)), self.width)


def untested_sizes(forms: Sequence[LinearForm], table: Table, most: Mapping[str, int]) -> tuple[str, ...]:
    """Parameters that the forms depend on, and that no row of ``table`` has larger than ``most``.

    A polynomial through a few values of a parameter says nothing about other values.
    """

    def follows(name: str) -> bool:
        moved = ({**table, name: table[name] + step} for step in range(1, 7))
        return any((form.at(other) != form.at(table)).any() for other in moved for form in forms)

    return tuple(name for name, value in most.items() if not (table[name] > value).any() and follows(name))


def chosen_rows(table: Table, rows: Any) -> Table:
    """Some rows of a table. rows: [n] their numbers, a slice, or [all] whether a row is one of them."""
    return {name: column[rows] for name, column in table.items()}


def monomial_values(monomial: Monomial, table: Table) -> Floats:
    """[rows] the product of the atoms at each row of the table."""
    rows = len(next(iter(table.values())))
    result = np.ones(rows)
    for atom in monomial:
        result = result * atom.value(table)
    return result


def size_atom(name: str, rank: bool = False) -> Atom:
    return Atom(name, name, lambda table: table[name], rank, name)


def families(names: Names, rank: str | None = None) -> Iterator[list[Monomial]]:
    """Sets of monomials to try, the plainest first. Later sets contain the second one.

    1. linear; 2. products and squares; 3. the parity of the ranks, and a rank's distance to the nearer end;
    4. thirds of the number of ranks; 5. whole rounds of microbatches, which latencies depend on.
    """
    ranks, microbatches, *_ = names
    P, M, *extra = map(size_atom, names)
    r = [size_atom(rank, rank=True)] if rank else []
    single = [P, M, *extra, *r]
    linear: list[Monomial] = [(), *((a,) for a in single)]
    yield linear
    products: list[Monomial] = [*combinations(single, 2), (P, P)]
    products += [(P, M, a) for a in extra]
    yield (bilinear := linear + products)
    odd = Atom(f"({ranks} % 2)", rf"({ranks} \bmod 2)", lambda table: table[ranks] % 2, of=ranks)
    shaped: list[Monomial] = [(odd,), (odd, P)]
    thirds = [
        Atom(f"({text}//3)", rf"\lfloor {text.strip('()')}/3 \rfloor", value, of=ranks)
        for text, value in _thirds(ranks)
    ]
    if rank:
        end = Atom(
            f"min({rank}, {ranks} - 1 - {rank})",
            rf"\min({rank}, {ranks} - 1 - {rank})",
            lambda table: np.minimum(table[rank], table[ranks] - 1 - table[rank]),
            rank=True,
        )
        shaped += [(end,), *((end, a) for a in extra)]
    yield bilinear + shaped
    yield bilinear + [(a,) for a in thirds]
    if not rank:
        rounds = [_rounds(ranks, microbatches, behind) for behind in (0, 1, 2, 4)]
        yield bilinear + shaped + [(a,) for a in rounds] + [(a, b) for a in rounds[:1] for b in (P, *extra)]


def _thirds(ranks: str) -> tuple[tuple[str, Callable[[Table], Int64]], ...]:
    """Floors that, with the number of ranks itself, express any dependence on its remainder by 3."""
    return (ranks, lambda table: table[ranks] // 3), (f"({ranks} + 1)", lambda table: (table[ranks] + 1) // 3)


def _rounds(ranks: str, microbatches: str, behind: int) -> Atom:
    less = f"({microbatches} - {behind})" if behind else microbatches
    return Atom(
        f"({less}//{ranks})",
        rf"\lfloor {less}/{ranks} \rfloor",
        lambda table: (table[microbatches] - behind) // table[ranks],
    )


def fit(targets: Floats, table: Table, monomials: list[Monomial]) -> list[LinearForm | None]:
    """[K] the form that equals ``targets[:, k]`` at every row; None where these monomials cannot express it.

    targets: [n, K, symbols]. A monomial that depends linearly on earlier ones at these rows is left out, so that the
    form is the plainest. Coefficients are fractions, accepted only if they give every target exactly.
    """
    rows, count, symbols = targets.shape
    kept, design = _independent(monomials, table)
    if rows < SPARE * len(kept) or _interpolates(kept, table):
        return [None] * count
    flat = targets.reshape(rows, -1)
    solution, *_ = np.linalg.lstsq(design, flat, rcond=None)
    worst = (np.abs(design @ solution - flat) / (1 + np.abs(flat))).max(axis=0)
    right = (worst.reshape(count, symbols) < 1e-6).all(axis=1).tolist()
    cubes: Floats = np.asarray(solution.reshape(len(kept), count, symbols), np.float64)
    return [_exact(kept, design, cubes[:, k], targets[:, k]) if right[k] else None for k in range(count)]


def _interpolates(monomials: list[Monomial], table: Table) -> bool:
    """Whether one column has as many monomials as values: such monomials fit any targets."""
    alone = [{atom.of for atom in monomial} for monomial in monomials]
    return any(sum(of <= {name} for of in alone) >= len(np.unique(column)) > 1 for name, column in table.items())


def _exact(monomials: list[Monomial], design: Floats, solution: Floats, target: Floats) -> LinearForm | None:
    fractions = [[Fraction(float(x)).limit_denominator(LARGEST_DENOMINATOR) for x in row] for row in solution]
    scale = np.lcm.reduce([f.denominator for row in fractions for f in row])
    whole = np.array([[int(f * int(scale)) for f in row] for row in fractions], np.int64)
    if not np.array_equal(design.astype(np.int64) @ whole, np.rint(target).astype(np.int64) * scale):
        return None
    terms = zip(monomials, (tuple(row) for row in fractions), strict=True)
    return LinearForm(tuple((m, row) for m, row in terms if any(row)), target.shape[1])


def _independent(monomials: list[Monomial], table: Table) -> tuple[list[Monomial], Floats]:
    """(monomials, [n, monomials] values) that no combination of earlier monomials equals at these rows."""
    kept: list[Monomial] = []
    columns: list[Floats] = []
    basis: list[Floats] = []
    for monomial in monomials:
        values = monomial_values(monomial, table)
        rest = values / max(1.0, float(np.linalg.norm(values)))
        for _ in range(2):  # twice, for what rounding left
            for direction in basis:
                rest = rest - (rest @ direction) * direction
        if (size := float(np.linalg.norm(rest))) > 1e-7:
            kept.append(monomial)
            columns.append(values)
            basis.append(rest / size)
    return kept, np.stack(columns, axis=1)
