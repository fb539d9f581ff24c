"""Runs go on with the bits of an undisturbed run: from memory, from disk, and on other ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from schedc_runtime.keeper.places import SHARED_MEMORY
from schedc_runtime.ranks.processes import has_ended, process_here
from schedc_runtime.saved.read import committed_steps
from schedc_runtime.testing import pool
from support.kept_runs import Run

STEPS = 6


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends in time, and with it the images of this user's runs."""
    keeper, deadline = process_here(pid), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if has_ended(keeper):
            return True
        time.sleep(0.02)
    return False


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
    """The keeper of the first attempt says who died, and brings the newest state to disk. The second goes on."""
    workers = pool(2)
    where = {"schedule": "1f1b", "steps": STEPS}
    undisturbed = workers.run("support.kept_runs:kept_run", root=str(tmp_path / "whole"), **where)
    for number, point in enumerate(["backward", "copy", "flip", "copied", "update"]):
        root = tmp_path / point
        kill = [number % 2, point, 3]
        outcomes = workers.outcomes("support.kept_runs:kept_run", root=str(root), kill=kill, **where)
        assert outcomes[number % 2].kind == "died"
        deadline = time.monotonic() + 10
        while any(SHARED_MEMORY.glob(f"schedc-{os.getuid()}-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not list(SHARED_MEMORY.glob(f"schedc-{os.getuid()}-*"))
        assert committed_steps(root)[-1] == (2 if point in ("copy", "flip") else 3)
        again = workers.run("support.kept_runs:kept_run", root=str(root), **where)
        assert again[0][1] == undisturbed[0][1]
        assert gone(again[0][2])
