"""Uneven experts as a cause, from traces whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from schedc.diagnose.causes import Causes
from schedc.diagnose.open_traces import open_traces
from schedc.diagnose.ranking import diagnose
from schedc.step.dependencies import Dependencies
from support.sweeps import halved
from support.synthetic_traces import World, schedule_at, write_steps

MEAN = 400.0
"""Rows, 4 ms."""


def rows_of(known: Dependencies, cell: int, fuller: bool) -> tuple[float, float, float]:
    """Rows of a cell, by its microbatch; the same in forwards and backwards. fuller: on the fullest rank of a group."""
    row = int(known.first[cell])
    most = MEAN * (1.2 + 0.15 * (int(known.schedule.microbatch[row]) % 5))
    return most if fuller else 2 * MEAN - most, most, MEAN


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("fuller", [True, False])
@pytest.mark.parametrize("name", halved(["1f1b", "interleaved_1f1b"]))
def test_uneven_experts_gain_the_step_at_mean_rows(name: str, fuller: bool, tmp_path: Path) -> None:
    """Traces of the fullest rank, and of a rank that waits for the fullest."""
    known = schedule_at(name, P=4, M=8)
    slow = World(rows=lambda cell: rows_of(known, cell, fuller), noise=0.002)
    fine = World(rows=lambda _cell: (MEAN, MEAN, MEAN), noise=0.002)
    write_steps(tmp_path / "slow", known, slow)
    write_steps(tmp_path / "fine", known, fine)
    told = diagnose(Causes(open_traces([tmp_path / "slow"])))
    saved = 1 - np.mean(fine.makespans) / np.mean(slow.makespans)
    assert told.residual < 1e-6 < 0.05 < saved
    assert told.causes[0].cause.name == "experts = even"
    assert told.causes[0].gain == pytest.approx(saved, abs=2e-3)
    shares = [1.2 + 0.15 * (microbatch % 5) for microbatch in range(8)]
    assert f"has {np.mean(shares):.2f} times the mean rows" in told.causes[0].cause.why
    assert "data = equal" not in [each.cause.name for each in told.causes]


def test_even_experts_are_no_cause(tmp_path: Path) -> None:
    known = schedule_at("1f1b", P=4, M=8)
    write_steps(tmp_path / "trace", known, World(rows=lambda _cell: (MEAN, MEAN, MEAN)))
    replay = open_traces([tmp_path / "trace"])
    assert "experts = even" not in [cause.name for cause in Causes(replay).all(replay.parts)]


def test_time_without_a_core_is_no_time_of_a_row(tmp_path: Path) -> None:
    """Experts that are kept off their core for 6 ms take no longer for their rows."""
    known = schedule_at("1f1b", P=2, M=2)
    (path,) = write_steps(tmp_path / "trace", known, World(rows=lambda _cell: (500.0, 500.0, 400.0)), steps=1)
    wanted = open_traces([path]).parts.uneven
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        if event["name"].endswith(" of 0.experts"):
            event["ts"], event["dur"] = event["ts"] - 6000, event["dur"] + 6000
            event["args"] = {"off core us": 4000, "garbage collection us": 2000}
    path.write_text(json.dumps(document))
    assert wanted.min() > 0.9
    assert open_traces([path]).parts.uneven == pytest.approx(wanted)


@pytest.mark.parametrize(
    "rows", ["x", [], [[1]], [[3, 2, 1]], [[-1, 2, 1]], [[1, 2, 3]], [[1, 2, 1], [1, 2, 1]], [1e300]]
)
def test_rows_that_cannot_be_are_left_out(rows: object, tmp_path: Path) -> None:
    known = schedule_at("1f1b", P=2, M=2)
    (path,) = write_steps(tmp_path / "trace", known, World(rows=lambda _cell: (300.0, 500.0, 400.0)), steps=1)
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        if "expert rows" in event.get("args", {}):
            event["args"]["expert rows"] = rows
    path.write_text(json.dumps(document))
    assert not open_traces([path]).parts.uneven.any()
