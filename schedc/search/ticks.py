"""Expresses times and memory as integers for the search: exactly if possible, otherwise rounded down."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np

from schedc.ir.arrays import Floats, Int64

_DENOMINATOR = 10**5
"""Largest denominator of a cost that is exact."""
_CLOSE = 1e-12
"""Relative difference below which a float is taken for a fraction."""
_LARGEST = 10**9
"""Most ticks of the longest time. The solver handles this many well."""


@dataclass(frozen=True)
class TickGrid:
    """A unit of time or memory for the search.

    ticks: number of ticks per unit of cost. exact: whether every cost is a whole number of ticks.
    """

    ticks: int | float
    exact: bool

    def down(self, values: Floats) -> Int64:
        """Ticks of each value, rounded down; no rounding on an exact grid. values: any shape, in units of cost."""
        scaled = np.asarray(values, np.float64) * self.ticks
        nearest = np.rint(scaled)
        close = np.abs(scaled - nearest) <= _CLOSE * 16 * np.maximum(np.abs(nearest), 1)
        return np.where(close, nearest, np.floor(scaled)).astype(np.int64)

    def up(self, values: Floats) -> Int64:
        """Ticks of each value, rounded up; no rounding on an exact grid. values: any shape, in units of cost."""
        return -self.down(-np.asarray(values, np.float64))

    def cost(self, ticks: int) -> float:
        """The value of so many ticks, in units of cost."""
        return ticks / self.ticks


def grid_for(values: Floats, longest: float) -> TickGrid:
    """The grid for values in units of cost, no sum of which exceeds ``longest``.

    A float is taken for the fraction with a denominator up to 10^5 within 1e-12 (relative) of it, so 0.1 and 1/3 are
    exact. If a value is no such fraction, or ``longest`` would have more than 10^9 ticks, the grid divides ``longest``
    into 10^9 ticks.
    """
    distinct = np.unique(np.asarray(values, np.float64)).tolist()
    fractions = [Fraction(value).limit_denominator(_DENOMINATOR) for value in distinct]
    close = all(
        abs(float(near) - value) <= _CLOSE * abs(value) for near, value in zip(fractions, distinct, strict=True)
    )
    common = 1
    for fraction in fractions if close else ():
        common = lcm(common, fraction.denominator)
        if common * longest > _LARGEST:
            break
    if close and common * longest <= _LARGEST:
        return TickGrid(common, exact=True)
    return TickGrid(_LARGEST / longest, exact=False)
