"""Runs the numbered examples that need one process; `test_embedding` and `test_moe_training` run the trainers."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import schedc
from support.needs import needed
from support.paths import ROOT
from support.sweeps import in_sweeps
from support.warm_programs import warm_programs

EXAMPLES = ROOT / "examples"
NUMBERED = sorted(path.name for path in EXAMPLES.iterdir() if re.match(r"\d\d_", path.name))


def test_the_examples_are_numbered_and_the_folder_lists_them() -> None:
    assert [int(name[:2]) for name in NUMBERED] == list(range(1, len(NUMBERED) + 1))
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name.rstrip("/") for name in re.findall(r"^\| `(\d\d_[\w./]+)`", table, re.MULTILINE)] == NUMBERED


def test_01_compares_schedules(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["01_check.py", "gpipe", "dualpipev", "--ranks", "2", "--microbatches", "6"])
    runpy.run_path(str(EXAMPLES / "01_check.py"), run_name="__main__")
    heading, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heading == ["schedule", "step", "bubble", "peak", "claims"]
    assert rows[0][:4] == ["gpipe", "17.50", "14.3%", "6.0"]  # (M+P-1)*(F+B), (P-1)/(M+P-1), M
    assert rows[1][0] == "dualpipev"
    assert float(rows[1][1]) < float(rows[0][1])
    assert rows[1][3] == "2.5"  # 2P+1 half stages


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (3, 3), (4, 8), (5, 23), (8, 9)])
def test_03_keeps_its_claims_and_beats_1f1b(ranks: int, microbatches: int) -> None:
    sizes = {"P": ranks, "M": microbatches}
    own = schedc.analyse(EXAMPLES / "03_own_schedule.sched", sizes)
    assert [claim.status for claim in own.claims] == ["proved", "proved"]
    assert schedc.analyse("1f1b", sizes).timeline.makespan - own.timeline.makespan == ranks - 2


@pytest.mark.parametrize("path", sorted((EXAMPLES / "04_plan").glob("*.sched")), ids=lambda path: path.stem)
def test_04_every_plan_is_legal_and_carries_its_layers(path: Path) -> None:
    for name in re.findall(r"^plan (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
        schedule = schedc.analyse(f"{path}:{name}", {}).schedule
        assert (schedule.name, schedule.layers > 0) == (name, True)


@in_sweeps(
    "runtime/commands/test_calibrate.py::test_calibrate_check_run",
    "runtime/measure/test_planned.py::test_ops_in_one_piece_start_and_send_as_a_whole",
)
@pytest.mark.slow
@pytest.mark.processes
def test_plan_local_trains_and_emulates_the_best_plan(tmp_path: Path) -> None:
    needed("scipy")
    quick = {"BATCH": "8x32", "TRAINED": "01", "EMULATED": "1"}
    (tmp_path / "programs").mkdir()
    environment = {**os.environ, **quick, "BIN": str(tmp_path / "programs")}
    command = ["bash", str(EXAMPLES / "plan_local.sh"), str(tmp_path / "out")]
    with warm_programs(tmp_path / "programs"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("check passed: loss and gradients of 2 steps, all ranks") == 1
    table = done.stdout.partition("== predicted and emulated")[2].splitlines()
    rows = [line.split() for line in table if line.endswith("%")]
    assert [row[0] for row in rows] == ["01.sched"]
    assert abs(float(rows[0][-2])) <= 5
    assert subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode == 2
