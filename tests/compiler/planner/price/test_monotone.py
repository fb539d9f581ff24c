"""No plan is slower where anything is faster, no bar is negative, and no bound is above a price."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

from truth.cases import Options
from truth.monotone import monotone

from schedc.planner.times.constants import CONSTANTS


def test_nothing_faster_makes_a_plan_slower() -> None:
    """800 raised speeds on 40 plans. A constant whose direction is taken the wrong way round fails, too."""
    verdict = monotone(Options(800))
    assert (verdict.cases, verdict.failed) == (800, ())
    assert verdict.figures["raised"].keys() >= {constant.name for constant in CONSTANTS}
    assert verdict.figures["checked"].keys() == {
        "slower", "layout", "scale", "devices", "negative bars", "sum of bars", "bound"
    }  # fmt: skip
