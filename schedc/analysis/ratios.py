"""Idle time and its share of a step, the same for one timeline and for many."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def idle(whole: Floats, busy: Floats) -> Floats:
    """whole - busy, with what only rounding left over as 0: sums of many times differ in their last digits."""
    rest = whole - busy
    return np.asarray(np.where(np.abs(rest) <= 1e-12 * whole, 0.0, rest))


def span_ratios(span: Floats, busy: Floats) -> Floats:
    """[K] idle share of the rank with the largest span; of several, of the one that is idle most."""
    tied = span >= span.max(axis=0) * (1 - 1e-12)
    least = np.where(tied, busy, np.inf).min(axis=0)
    return ratios(span.max(axis=0), least)


def ratios(whole: npt.ArrayLike, part: npt.ArrayLike) -> Floats:
    """1 - part / whole; 0 where there is nothing to do."""
    whole = np.asarray(whole, np.float64)
    safe = np.where(whole > 0, whole, 1.0)
    return np.asarray(np.where(whole > 0, (whole - part) / safe, 0.0))
