"""A rank that is killed under torchrun is reported with its instruction, wherever it was."""

from __future__ import annotations

import pytest

from support.named_kills import PLACES, SOON, killed
from support.sweeps import swept


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "place"), [(2, "backward"), *swept([(0, "forward"), (3, "wait")], [])])
def test_a_kill_is_reported_with_its_instruction(victim: int, place: str) -> None:
    """Rank 0 holds no store here; torch's agent does. `benchmarks/resilience.py named` has more kills."""
    report, text = killed(victim, place)
    assert PLACES[place] in report.instruction, text
    assert 0 <= report.seconds <= SOON, text
