"""Applies the diffs of CONTRIBUTING.md to a copy of the compiler, and runs what they add."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiler, the library and every diff applied."""
    folder = tmp_path_factory.mktemp("contributing")
    for name in ("schedc", "schedules"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL):
        applied = subprocess.run(
            ["git", "apply", "--verbose", "-"],
            cwd=folder,
            input=diff,
            capture_output=True,
            text=True,
            check=False,
        )
        assert applied.returncode == 0, applied.stderr + diff
    return folder


def schedc(folder: Path, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "schedc", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_added_schedule_is_in_the_library_and_keeps_its_claims(copy: Path) -> None:
    status, output = schedc(copy, "check", "gpipe_lifo", "-D", "P=3", "-D", "M=5")
    assert (status, output.count("proved for all costs at this size")) == (0, 2), output
    assert re.search("^gpipe_lifo +GPipe, backwards last in first out", schedc(copy, "list")[1], re.MULTILINE)


def test_the_added_diagnostic_is_raised_explained_and_mended(copy: Path) -> None:
    status, output = schedc(copy, "explain", "S130")
    assert status == 0
    wrong, right = (re.sub("^    ", "", part, flags=re.M) for part in re.split("Wrong:\n\n|Right:\n\n", output)[1:])
    for text, expected in ((wrong, 1), (right, 0)):
        (copy / "example.sched").write_text(text, encoding="utf-8")
        status, output = schedc(copy, "check", "example.sched")
        assert (status, "error[S130]: a phase without ops" in output) == (expected, bool(expected)), output


def test_the_added_target_is_offered_and_writes_every_op(copy: Path) -> None:
    status, output = schedc(copy, "export", "gpipe", "-D", "P=2", "-D", "M=1", "--to", "ops")
    assert status == 0, output
    assert output.splitlines() == [
        "rank\top\tstage\tmicrobatch",
        "0\tF\t0\t0",
        "0\tB\t0\t0",
        "1\tF\t1\t0",
        "1\tB\t1\t0",
    ]
    assert "a table with one line per op" in schedc(copy, "export", "--help")[1]
