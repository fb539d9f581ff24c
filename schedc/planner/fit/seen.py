"""Which sizes the rows of a fit have, and which sizes of a plan lie beyond them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from schedc.planner.times.problem import TrainingRun

SEEN_AXES = ("tp", "pp", "vpp", "dp", "ep", "cp", "zero", "microbatch")
"""Sizes of a run that the constants of a fit follow from, among others."""

SeenRanges: TypeAlias = Mapping[str, tuple[int, int]]
"""By axis: the smallest and the largest value of the rows."""


def seen_ranges(runs: Sequence[TrainingRun]) -> dict[str, tuple[int, int]]:
    """The ranges of these runs."""
    values = {axis: [getattr(run.axes, axis) for run in runs] for axis in SEEN_AXES}
    return {axis: (min(each), max(each)) for axis, each in values.items() if each}


def beyond(seen: SeenRanges, axes: Mapping[str, object]) -> Iterator[str]:
    """The axes of a plan that lie beyond the rows, with their values: ``ep 64 (rows: 1 to 32)``."""
    for axis, (low, high) in seen.items():
        value = axes.get(axis)
        if isinstance(value, int) and not low <= value <= high:
            rows = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            yield f"{axis} {value:,} (rows: {rows})"
