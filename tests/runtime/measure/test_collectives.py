"""The benchmark of collectives: its line through times, and figures of two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from support.paths import ROOT


@pytest.fixture
def collectives() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import collectives

        yield collectives
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_a_line_through_times(collectives: ModuleType) -> None:
    speed, start = collectives.fitted_line([1e6, 4e6, 1.6e7], [1e-5 + 1e6 / 2e9, 1e-5 + 4e6 / 2e9, 1e-5 + 1.6e7 / 2e9])
    assert (speed, start) == (pytest.approx(2e9), pytest.approx(1e-5))
    assert collectives.fitted_line([1e6, 2e6], [2e-3, 1e-3]) == (pytest.approx(2e9), 0.0)
    assert [collectives.level_Bps("h100", ranks) for ranks in (8, 16)] == [450e9, 50e9]


@pytest.mark.slow
@pytest.mark.processes
def test_figures_of_two_ranks() -> None:
    options = ["--ranks", "2", "--megabytes", "1", "2", "--repetitions", "1", "--cluster", "h100", "--json"]
    command = [sys.executable, "benchmarks/collectives.py", *options]
    figures = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert (figures["ranks"], figures["device"]) == (2, "cpu")
    for name in ("gather", "scatter", "sum"):
        assert figures[name]["share"] == figures[name]["speed_Bps"] / 450e9 > 0
