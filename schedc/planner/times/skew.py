"""The rows of the fullest rank of an expert group, by the spread of the experts' loads and the size of the group.

Loads of E experts follow a symmetric Dirichlet distribution with a = 1 / cv^2. Of many experts, cv is the standard
deviation of a load over its mean. A rank of n has E / n experts, so that its load is a share of n gamma variables of
shape k = a E / n. The fullest of them has, over the mean,

    rho(n) = 1/k  integral of 1 - P(k, x)^n over x from 0 on

with P the regularised lower incomplete gamma function: the share of a gamma variable is independent of their sum.
"""

from __future__ import annotations

from functools import cache
from math import lgamma, sqrt
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats

LOADS, LOADS_WIDTH = 0.4, 0.5
"""The spread of the loads of experts, and the width of its logarithm, where nobody says them. Both are assumed."""

LOADS_NAME = "loads"
LOADS_SAYS = "spread of the loads of experts; assumed"

_POINTS = 4001
_TERMS = 10_000
_EXACT = 1e-15


@cache
def fullest_rank(experts: int, ranks: int, spread: float) -> float:
    """Rows of the fullest of so many ranks over their mean, expected. spread: of the loads of experts, as cv."""
    if ranks <= 1 or spread <= 0.0:
        return 1.0
    shape = experts / (spread**2 * ranks)
    end = _end(shape, ranks)
    x = np.linspace(0.0, end, _POINTS)
    left = 1.0 - lower_gamma(shape, x) ** ranks
    weights = np.ones(_POINTS)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    return min(float(ranks), float(weights @ left) * end / (_POINTS - 1) / 3.0 / shape)


def spread_of(experts: int, ranks: int, fullest: float, most: float) -> float | None:
    """The spread of loads at which the fullest of so many ranks has ``fullest`` times the mean; None beyond ``most``.

    By bisection: the fullest rank grows with the spread.
    """
    low, high = 0.0, most
    if ranks <= 1 or fullest_rank(experts, ranks, high) < fullest:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fullest_rank(experts, ranks, middle) < fullest else (low, middle)
    return high


class RecordedSkew(NamedTuple):
    """The fullest rank of expert groups, from the rows of a recorded routing.

    fullest: by ranks of a group, rows of the fullest one over the mean. spread: of the loads of experts, with which
    the law gives larger groups; None where no spread gives the fullest rank of the largest recorded group.
    """

    fullest: tuple[tuple[int, float], ...]
    spread: float | None


def recorded_skew(experts: int, rows: Floats, most: float) -> RecordedSkew:
    """What rows say of the fullest rank, and the spread of loads up to ``most`` that they follow from.

    rows: [layers, microbatches, ranks]. Groups of fewer ranks have the rows of neighbours together. The fullest rank
    of each layer and microbatch counts, in the mean.
    """
    ranks = rows.shape[2]
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    fullest = []
    for size in sizes:
        of_ranks = rows.reshape(*rows.shape[:2], size, ranks // size).sum(axis=3)
        mean = of_ranks.mean(axis=2)
        fullest.append((of_ranks.max(axis=2)[mean > 0] / mean[mean > 0]).mean() if (mean > 0).any() else 1.0)
    spread = spread_of(experts, ranks, float(fullest[-1]), most)
    return RecordedSkew(tuple(zip(sizes, map(float, fullest), strict=True)), spread)


def _end(shape: float, ranks: int) -> float:
    """Where the integrand has become zero in doubles."""
    end = shape + 10.0 * sqrt(shape) + 10.0
    while 1.0 - float(lower_gamma(shape, np.array([end]))[0]) > 1e-16 / ranks:
        end *= 1.25
    return end


def lower_gamma(shape: float, x: Floats) -> Floats:
    """The regularised lower incomplete gamma function P(shape, x), by its series or its continued fraction."""
    result = np.zeros(len(x))
    small = (x > 0) & (x < shape + 1)
    large = x >= shape + 1
    result[small] = _series(shape, x[small])
    result[large] = 1.0 - _fraction(shape, x[large])
    return result


def _front(shape: float, x: Floats) -> Floats:
    factor: Floats = np.exp(shape * np.log(x) - x - lgamma(shape))
    return factor


def _series(shape: float, x: Floats) -> Floats:
    """x^s e^-x / Gamma(s) times the sum of x^m / (s (s + 1) ... (s + m))."""
    term = np.full(len(x), 1.0 / shape)
    total = term.copy()
    for m in range(1, _TERMS):
        term = term * x / (shape + m)
        total += term
        if not np.any(term > total * _EXACT):
            break
    return total * _front(shape, x)


def _fraction(shape: float, x: Floats) -> Floats:
    """The upper function by Legendre's continued fraction, with Lentz's algorithm."""
    b = x + 1.0 - shape
    c = np.full(len(x), 1e300)
    d = 1.0 / b
    result = d.copy()
    for m in range(1, _TERMS):
        a = -m * (m - shape)
        b = b + 2.0
        d = 1.0 / (a * d + b)
        c = b + a / c
        step = c * d
        result *= step
        if not np.any(np.abs(step - 1.0) > _EXACT * 10):
            break
    return result * _front(shape, x)
