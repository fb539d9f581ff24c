"""The row ``slices`` of a table of cells: how much longer slices take than whole microbatches."""

from __future__ import annotations

from schedc.cell.costs import SliceFactor
from schedc.cell.rows import Problem
from schedc.ir.plan import MOST_SLICES

MOST_FACTOR = 100.0
"""Largest factor; more is a mistake of the writer."""
_EXAMPLE = "write slices = {2 = 1.05, 4 = 1.15}, or [segments, exchanges] in place of a number"


def read_factors(value: object) -> tuple[tuple[SliceFactor, ...], list[Problem]]:
    """The factors of ``{2 = 1.05, 4 = [1.1, 1.02]}``, ascending by the number of slices, and its findings."""
    if not isinstance(value, dict):
        return (), [("S402", f"`slices` is {value!r}", "slices", _EXAMPLE)]
    factors: list[SliceFactor] = []
    for key, entry in value.items():
        pair = entry if isinstance(entry, list) and len(entry) == 2 else [entry, 1.0]
        if not key.isdecimal() or not 2 <= int(key) <= MOST_SLICES:
            help = f"a number of slices is from 2 to {MOST_SLICES}"
            return (), [("S402", f"`slices` has a factor for `{key}`", "slices", help)]
        if any(isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x <= MOST_FACTOR for x in pair):
            return (), [("S402", f"`{key}` of `slices` is {entry!r}", "slices", _EXAMPLE)]
        factors.append(SliceFactor(int(key), float(pair[0]), float(pair[1])))
    return tuple(sorted(factors)), []


def write_factors(factors: tuple[SliceFactor, ...]) -> list[str]:
    """The line of the factors; `read_factors` gives back an equal value. Without factors there is no line."""
    rows = (
        f"{x.slices} = {x.segments!r}" if x.exchanges == 1 else f"{x.slices} = [{x.segments!r}, {x.exchanges!r}]"
        for x in factors
    )
    return [f"slices = {{{', '.join(rows)}}}"] if factors else []
