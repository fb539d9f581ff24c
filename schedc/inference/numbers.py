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
            for chosen in combinations(range(len(names)), number)
            if (factors := _exact(columns[list(chosen)], wanted)) is not None
        ]
        if fits:
            return min(fits, key=lambda fit: max((Fraction(factor).denominator for factor, _ in fit), default=1))
    return None


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
