"""Regions of sizes in which one formula may hold, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Bools, Int64


@dataclass(frozen=True, eq=False)
class SizeRegion:
    """Sizes that satisfy a condition.

    texts: the condition, with ``{P}`` and ``{M}`` for ranks and microbatches.
    holds: [n] whether the condition holds, from [n] numbers of ranks and [n] numbers of microbatches.
    """

    texts: tuple[str, ...]
    holds: Callable[[Int64, Int64], Bools]

    def of(self, table: Mapping[str, Int64], names: Sequence[str]) -> Bools:
        """[n] whether each row of the table is in the region. names: of ranks and microbatches, and others."""
        return np.asarray(self.holds(table[names[0]], table[names[1]]), bool)

    def bounds(self, ranks: int) -> bool:
        """Whether the region has no size with more than ``ranks`` ranks."""
        P, M = (side.ravel() for side in np.mgrid[ranks + 1 : 2 * ranks + 3, 1 : 8 * ranks + 8])
        return not np.any(self.holds(P, M))

    def conditions(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(text.format(P=names[0], M=names[1]) for text in self.texts)


REGIONS = (
    SizeRegion((), lambda P, M: P > 0),
    SizeRegion(("{P} >= 3",), lambda P, M: P >= 3),
    SizeRegion(("{M} >= {P}",), lambda P, M: M >= P),
    SizeRegion(("{P} >= 3", "{M} >= {P}"), lambda P, M: (P >= 3) & (M >= P)),
    SizeRegion(("{M} % {P} == 0",), lambda P, M: M % P == 0),
    SizeRegion(("{M} >= 2*{P}",), lambda P, M: M >= 2 * P),
    SizeRegion(("{P} >= 4", "{M} >= 2*{P}"), lambda P, M: (P >= 4) & (M >= 2 * P)),
    SizeRegion(("{M} % {P} == 0", "{M} >= 2*{P}"), lambda P, M: (M % P == 0) & (M >= 2 * P)),
    SizeRegion(("{P} >= 4", "{P} % 2 == 0", "{M} >= 2*{P}"), lambda P, M: (P >= 4) & (P % 2 == 0) & (M >= 2 * P)),
    SizeRegion(("{M} >= 3*{P}",), lambda P, M: M >= 3 * P),
)

REMAINDERS = (
    SizeRegion(("{M} < {P}",), lambda P, M: M < P),
    SizeRegion(("{M} < 2*{P}",), lambda P, M: M < 2 * P),
    SizeRegion(("{P} <= {M}", "{M} < 2*{P}"), lambda P, M: (P <= M) & (M < 2 * P)),
    SizeRegion(("{P} == 2",), lambda P, M: P == 2),
    SizeRegion(("{P} <= 3",), lambda P, M: P <= 3),
    SizeRegion(("{M} % {P} != 0",), lambda P, M: M % P != 0),
    SizeRegion(("{M} < 3*{P}",), lambda P, M: M < 3 * P),
)
"""Regions for the sizes that remain where a formula holds in one of `REGIONS` only."""
