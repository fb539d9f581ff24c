"""Quantiles of few numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from schedc.ir.arrays import Floats


def lower_quartile(values: Iterable[float]) -> float:
    """The value below which a quarter of all is."""
    ordered = sorted(values)
    place, part = divmod(len(ordered) - 1, 4)
    return ordered[place] + (ordered[min(place + 1, len(ordered) - 1)] - ordered[place]) * part / 4


def lower_quartiles(rows: Floats) -> Floats:
    """[columns] `lower_quartile` of each column of [rows, columns]."""
    ordered = np.sort(rows, axis=0)
    place, part = divmod(len(ordered) - 1, 4)
    below: Floats = ordered[place]
    above: Floats = ordered[min(place + 1, len(ordered) - 1)]
    return np.add(below, np.subtract(above, below) * (part / 4))
