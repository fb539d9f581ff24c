"""Idle time and its share of a step, the same for one timeline and for many."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Floats


def idle(whole: Floats, busy: Floats) -> Floats:
    """whole - busy, in the unit of both, for arrays of any shape. What only rounding left over is 0.

    Sums of many times differ in their last digits.
    """
    rest = whole - busy
    return np.asarray(np.where(np.abs(rest) <= 1e-12 * whole, 0.0, rest))


def span_ratios(span: Floats, busy: Floats) -> Floats:
    """[K] idle share of P ranks that each have the longest span as their time; span, busy: [P, K]."""
    return ratios(span.max(axis=0), busy.mean(axis=0))


def ratios(whole: npt.ArrayLike, part: npt.ArrayLike) -> Floats:
    """1 - part / whole, element by element for arrays of any shape; 0 where there is nothing to do, as in `idle`."""
    whole = np.asarray(whole, np.float64)
    safe = np.where(whole > 0, whole, 1.0)
    return np.asarray(np.where(whole > 0, idle(whole, np.asarray(part, np.float64)) / safe, 0.0))
