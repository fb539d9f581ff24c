"""Reports intervals of steps: their ends, where widths are from, and which constants make steps unsure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedc.planner.price.intervals import StepInterval
from schedc.planner.times.skew import LOADS_NAME
from schedc.planner.times.spread import ConstantSpread

_NAMED = 3
"""Constants that a sentence names."""


def interval_facts(interval: StepInterval, step: float, known: ConstantSpread) -> dict[str, Any]:
    """The interval of a step of so many seconds. wide: by constant, its share of the variance, in percent.

    undecided: constants without a row.
    """
    low, high = interval.ends(step)
    wide = {name: round(100.0 * share, 1) for name, share in interval.shares}
    return {
        "low_s": low,
        "high_s": high,
        "rows_pct": round(100.0 * interval.rows, 1),
        "wide": wide,
        "undecided": [name for name in wide if name in (*known.undecided, LOADS_NAME)],
    }


def whose_text(fit: Mapping[str, Any] | None) -> str:
    """Where intervals are from. fit: facts of the fit, if there is one."""
    if not fit or not fit["name"]:
        return "intervals hold 90 % of steps, by the priors of the constants: no row decides any"
    text = "intervals hold 90 % of steps, by the spread of the rows and of the constants"
    if fit["held_pct"] is None:
        return f"{text}; no model was left out to check them"
    return f"{text}; those of models left out hold {fit['held_pct']:.0f} % of their rows"


def wide_text(interval: Mapping[str, Any]) -> str:
    """Which constants that no row decides make an interval wide; empty where none does."""
    shares = [f"{name} {interval['wide'][name]:.0f} %" for name in interval["undecided"][:_NAMED]]
    return f"of its variance, constants without a row have {', '.join(shares)}" if shares else ""
