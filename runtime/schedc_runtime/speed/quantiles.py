"""Quantiles of few numbers."""

from __future__ import annotations

from collections.abc import Iterable


def lower_quartile(values: Iterable[float]) -> float:
    """The value below which a quarter of all is."""
    ordered = sorted(values)
    place, part = divmod(len(ordered) - 1, 4)
    return ordered[place] + (ordered[min(place + 1, len(ordered) - 1)] - ordered[place]) * part / 4
