"""Reports where a given plan stands among those of a search, and why it is not first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from schedc.report.figures import ordinal, seconds_text, word
from schedc.report.plans import COLUMNS, axes_text

_BARS = 6
"""Differences that the text shows; JSON has all."""


def to_text(explain: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `schedc plan ... --explain AXES`, of the JSON's ``explain``.

    asked: the axes as they were given. axes: those of the plan, the best one that has them. legal: whether the space
    has such a plan. fits: whether one fits in memory. reason: why not, for either. rank: its place among the best
    ``among`` plans, null behind them. gap_pct: how much longer its step is than the best one. why: what it takes longer
    than the best plan, by cause, in seconds. differs: by axis, its value and that of the best plan.
    """
    yield f"the plan with {explain['asked']}"
    if not explain["legal"]:
        yield f"is not in the space: {explain['reason']}"
        return
    if not explain["fits"]:
        yield f"fits into no device: {explain['reason']}"
        return
    yield from textwrap.wrap(axes_text(explain["axes"]), COLUMNS - 2, initial_indent="  ", subsequent_indent="  ")
    yield f"takes {seconds_text(explain['step_s'])} s and {explain['needed_bytes'] / 1e9:.1f} GB: {_standing(explain)}"
    yield from _differences(explain)


def _standing(explain: Mapping[str, Any]) -> str:
    if explain["rank"] == 1:
        return "the best plan of the space"
    place = f"the {ordinal(explain['rank'])}" if explain["rank"] else f"behind the best {explain['among']}"
    return f"{place}, {explain['gap_pct']:.1f} % longer than the best one"


def _differences(explain: Mapping[str, Any]) -> Iterator[str]:
    if explain["differs"]:
        values = ", ".join(f"{name} {word(best)}" for name, (_, best) in explain["differs"].items())
        yield from textwrap.wrap(f"the best plan has {values}; the seconds between them:", COLUMNS)
    bars = sorted(explain["why"], key=lambda bar: -abs(bar["seconds"]))
    for bar in [bar for bar in bars if bar["seconds"]][:_BARS]:
        yield f"  {bar['what']:<30} {bar['seconds']:+10.4g} s"
