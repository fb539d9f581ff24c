"""Copies of states and of activations as causes, from traces whose truth is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from schedc.diagnose.causes import Causes
from schedc.diagnose.open_traces import open_traces
from schedc.diagnose.ranking import diagnose, gain_of
from support.sweeps import halved
from support.synthetic_traces import World, schedule_at, write_steps

HOST = 0.2


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("copied", halved(["SNAPSHOT", "OFFLOAD", "FETCH"]))
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_exposed_copies_gain_the_step_without_them(name: str, turned: bool, copied: str, tmp_path: Path) -> None:
    known = schedule_at(name, P=4, M=8)
    slow = World(
        host=HOST, copied=copied, turned=turned, copy=lambda cell: 4.0 + known.rank[cell] if cell % 3 == 0 else 0.0
    )
    write_steps(tmp_path / "slow", known, slow)
    fine = World(host=HOST)
    write_steps(tmp_path / "fine", known, fine)
    told = diagnose(Causes(open_traces([tmp_path / "slow"])))
    saved = 1 - np.mean(fine.makespans) / np.mean(slow.makespans)
    assert told.residual < 1e-6 < 0.05 < saved
    assert told.causes[0].cause.name == ("snapshots = none" if copied == "SNAPSHOT" else "offloads = none")
    assert told.causes[0].gain == pytest.approx(saved, abs=1e-3)
    mine = sum(slow.copy(cell) for cell in range(len(known)) if known.rank[cell] == 3)
    assert f"{mine:.2f} ms of them on rank 3" in told.causes[0].cause.why


@pytest.mark.parametrize("last", [0, 3])
def test_joins_behind_the_last_cell_are_a_part_of_the_step(last: int, tmp_path: Path) -> None:
    known = schedule_at("1f1b", P=4, M=8)
    slow = World(host=HOST, join=lambda rank: 90.0 if rank == last else 0.0)
    write_steps(tmp_path / "slow", known, slow)
    fine = World(host=HOST)
    write_steps(tmp_path / "fine", known, fine)
    replay = open_traces([tmp_path / "slow"])
    assert replay.steps.makespan == pytest.approx(slow.makespans, abs=HOST)
    told = diagnose(Causes(replay))
    assert told.residual < 1e-6
    assert told.causes[0].cause.name == "snapshots = none"
    joined = np.mean(fine.makespans) + (HOST / 2 if last == 0 else 0.0)  # the host's time in front of the JOIN stays
    assert told.causes[0].gain == pytest.approx(1 - joined / np.mean(slow.makespans), abs=1e-3)


def test_copies_in_front_of_a_cell_that_waits_anyway_gain_nothing(tmp_path: Path) -> None:
    known = schedule_at("1f1b", P=4, M=8)
    first = int(known.rank_start[3])  # waits for three stages
    write_steps(tmp_path / "trace", known, World(copy=lambda cell: 5.0 if cell == first else 0.0))
    replay = open_traces([tmp_path / "trace"])
    causes = Causes(replay)
    (cause,) = (each for each in causes.all(replay.parts) if each.name == "snapshots = none")
    assert gain_of(replay, cause)[0] == pytest.approx(0.0, abs=1e-9)
    assert "snapshots = none" not in [each.cause.name for each in diagnose(causes).causes]
