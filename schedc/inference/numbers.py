"""Fits numbers at several sizes by sums of few named terms, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np

from schedc.inference.families import Term
from schedc.ir.arrays import Floats

_LARGEST = 12
"""The largest denominator of a coefficient."""
_NEAR = 1e-4
"""Relative error of normal equations, above which no sum is exact."""


def fit_numbers(values: Sequence[int], terms: Mapping[str, Sequence[float]], most: int = 3) -> list[Term] | None:
    """The sum of at most ``most`` terms that is every value; None if there is none.

    values: [samples]. terms: by text, [samples] what the term is. Fewer terms win, then whole coefficients, then
    earlier terms.
    """
    wanted, names = np.array(values, float), list(terms)
    columns = np.array([terms[name] for name in names], float)
    for number in range(most + 1):
        fits: list[list[Term]] = [
            [(factor, names[column]) for factor, column in zip(factors, chosen, strict=True)]
            for chosen in _near(columns, wanted, number)
            if (factors := _exact(columns[list(chosen)], wanted)) is not None
        ]
        if fits:
            return min(fits, key=lambda fit: max((Fraction(factor).denominator for factor, _ in fit), default=1))
    return None


def _near(columns: Floats, wanted: Floats, number: int) -> list[tuple[int, ...]]:
    """The choices of so many columns by which sums come near the values: all choices are solved at once.

    columns: [terms, samples]. wanted: [samples].
    """
    chosen = list(combinations(range(len(columns)), number))
    if not number or not chosen:
        return chosen
    index = np.array(chosen)
    products, against = columns @ columns.T, columns @ wanted
    squares = products[index[:, :, None], index[:, None, :]]
    regular = np.flatnonzero(np.linalg.matrix_rank(squares, hermitian=True) == number)
    factors = np.linalg.solve(squares[regular], against[index[regular]][:, :, None])[:, :, 0]
    error = np.abs(np.einsum("ct,cts->cs", factors, columns[index[regular]]) - wanted).max(axis=1)
    return [chosen[each] for each in regular[error < _NEAR * (1 + np.abs(wanted).max())].tolist()]


def _exact(columns: Floats, wanted: Floats) -> list[Fraction] | None:
    """[terms] coefficients of a sum that is exact; None if none is, or not all terms are needed."""
    if not len(columns):
        return None if wanted.any() else []
    solution, _, rank, _ = np.linalg.lstsq(columns.T, wanted)
    if rank < len(columns):
        return None
    factors = [Fraction(value).limit_denominator(_LARGEST) for value in solution.tolist()]
    exact = np.array([float(factor) for factor in factors]) @ columns
    return factors if all(factors) and np.abs(exact - wanted).max() < 1e-6 else None
