"""No plan is slower where anything is faster, no bar is negative, and no bound is above a price."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

import pytest
from truth.cases import Options
from truth.monotone import monotone

from schedc.planner.times.constants import CONSTANTS
from support.sweeps import swept


@pytest.mark.slow
@pytest.mark.sweep
def test_nothing_faster_makes_a_plan_slower() -> None:
    """Raised speeds, 20 for each plan. A constant whose direction is taken the wrong way round fails, too."""
    cases = swept(2_000, 400)
    verdict = monotone(Options(cases))
    assert (verdict.cases, verdict.failed) == (cases, ())
    assert verdict.figures["raised"].keys() >= {constant.name for constant in CONSTANTS}
    assert verdict.figures["checked"].keys() == {
        "slower", "layout", "scale", "devices", "negative bars", "sum of bars", "bound"
    }  # fmt: skip
