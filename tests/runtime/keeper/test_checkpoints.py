"""Runs go on with the bits of an undisturbed run: from memory, from disk, and on other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.copy_costs import MOST, copy_ratio
from support.kept_runs import Run
from support.killed_runs import killed_flushes, killed_trainings

STEPS = 6


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("again", [("1f1b", 2), ("zbv", 2), ("1f1b", 1)])
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path, again: tuple[str, int], tied: bool) -> None:
    model = {"tied": tied}
    whole = Run(tmp_path / "whole", "1f1b", 2, model=model)
    whole.train(STEPS)
    expected = whole.state()
    whole.saved.close()
    first = Run(tmp_path / "cut", "1f1b", 2, model=model)
    first.train(3)
    memory = Run(tmp_path / "cut", *again, model=model)
    assert memory.train(4) == 2, "the state behind the last update was not copied yet"
    memory.saved.close()
    disk = Run(tmp_path / "cut", *again, model=model)
    assert disk.train(STEPS) == 4
    state = disk.state()
    disk.saved.close()
    near = 1e-12 if tied and again != ("1f1b", 2) else 0.0  # another order of sums over a tied weight
    assert [name for name in expected if not torch.allclose(state[name], expected[name], near, near)] == []


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_rank_loses_nothing(tmp_path: Path) -> None:
    """The keeper brings the newest state of the first attempt to disk, and the second goes on with the same bits."""
    cases = list(killed_trainings(2, ["1f1b"], ["copy", "update"], [3], tmp_path))
    assert len(cases) == 2
    assert [case for case in cases if case[1]] == []


@pytest.mark.slow
def test_a_killed_flush_is_ended_by_the_next() -> None:
    calls, failures = killed_flushes()
    assert calls >= 40, "each call of the system is a place to be killed at, and so is one of the next flush"
    assert failures == []


def test_a_copy_of_a_state_costs_little_more_than_its_bytes() -> None:
    assert min(copy_ratio(24, 32 << 20, 5)) <= MOST
