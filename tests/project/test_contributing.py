"""Applies the diffs of CONTRIBUTING.md to a copy of both packages, and runs what they add."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from project.command_server import CommandServer
from support.paths import ROOT

pytestmark = pytest.mark.slow

Schedc = Callable[..., tuple[int, str]]

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, the library and the guide, and every diff applied."""
    folder = tmp_path_factory.mktemp("contributing")
    for name in ("schedc", "runtime", "schedules", "docs/guide"):
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


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'runtime'}"}


@pytest.fixture(scope="module")
def schedc(copy: Path) -> Iterator[Schedc]:
    """Exit status and output of a command of the copy."""
    with CommandServer(sys.executable, copy, environment(copy)) as server:
        yield server.run


def test_the_added_schedule_is_in_the_library_and_keeps_its_claims(schedc: Schedc) -> None:
    status, output = schedc("check", "gpipe_lifo", "-D", "P=3", "-D", "M=5")
    assert (status, output.count("proved for all costs at this size")) == (0, 2), output
    assert re.search("^gpipe_lifo +GPipe, backwards last in first out", schedc("list")[1], re.MULTILINE)


def test_the_added_diagnostic_is_raised_explained_and_mended(copy: Path, schedc: Schedc) -> None:
    status, output = schedc("explain", "S130")
    assert status == 0
    wrong, right = (re.sub("^    ", "", part, flags=re.M) for part in re.split("Wrong:\n\n|Right:\n\n", output)[1:])
    for text, expected in ((wrong, 1), (right, 0)):
        (copy / "example.sched").write_text(text, encoding="utf-8")
        status, output = schedc("check", "example.sched")
        assert (status, "error[S130]: a phase without ops" in output) == (expected, bool(expected)), output


def test_the_added_target_is_offered_and_writes_every_op(schedc: Schedc) -> None:
    status, output = schedc("export", "gpipe", "-D", "P=2", "-D", "M=1", "--to", "ops")
    assert status == 0, output
    assert output.splitlines() == [
        "rank\top\tstage\tmicrobatch",
        "0\tF\t0\t0",
        "0\tB\t0\t0",
        "1\tF\t1\t0",
        "1\tB\t1\t0",
    ]
    assert "a table with one line per op" in schedc("export", "--help")[1]


PLAN = """plan mine = dualpipev(P = 2, M = 4) {
  layers 4
  experts 8 top 2
  auxiliary 0.25
}
"""

CARRIED_OUT = """
import sys
from pathlib import Path
import torch
import schedc
from schedc.ir.save import save_program
from schedc_runtime import Pipeline
from schedc_runtime.commands import run
from schedc_runtime.models.gpt import next_token_loss
from schedc_runtime.models.moe_transformer import MoEConfig, MoETransformer
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.router import RouterConfig

model = MoETransformer(MoEConfig(moe_blocks=3, routing=RouterConfig(8, 2)))
program = schedc.compile("mine.sched")
pipe = Pipeline(model, program, loss_fn=next_token_loss, in_process=True)
pipe.step(*[torch.zeros(4, 8, dtype=torch.int64)] * 2)
print({layer.router.routing.balance for _, layer in moe_layers(model)}, flush=True)
path = save_program(schedc.compile("checked.sched"), Path())
sys.exit(run.main(["--program", str(path), "--check", "bitwise", "--in-process"]))
"""


def test_the_added_directive_is_read_formatted_and_carried(copy: Path, schedc: Schedc) -> None:
    (copy / "mine.sched").write_text(PLAN, encoding="utf-8")
    assert schedc("fmt", "--check", "mine.sched")[0] == 0
    status, output = schedc("export", "mine.sched", "--to", "program")
    assert (status, 'plan "experts 8 top 2  auxiliary 0.25"' in output) == (0, True), output
    (copy / "wrong.sched").write_text(PLAN.replace("0.25", "0.25 drop probs"), encoding="utf-8")
    status, output = schedc("check", "wrong.sched")
    assert (status, "error[S144]: `auxiliary` takes a number alone" in output) == (1, True), output


def test_the_added_cost_counts(copy: Path, schedc: Schedc) -> None:
    status, output = schedc("check", "1f1b", "-D", "P=2", "-D", "M=3", "--cost", "launch=0.5")
    assert (status, "makespan 16," in output) == (0, True), output
    assert "proved for all costs at this size (not the given ones: it speaks of launch = 0)" in output
    assert "| `launch` | time that every op" in (copy / "docs" / "guide" / "costs.md").read_text(encoding="utf-8")


CHECKED = """schedule checked(P: ranks = 2, M: microbatches = 4) {
  place linear
  rank r {
    repeat M { F }
    repeat M { B  C }
  }
  expect makespan == (M + P - 1)*(F + B) + M*C  when C <= F + B
}
"""


def test_the_added_kind_is_ordered_priced_and_drawn(copy: Path, schedc: Schedc) -> None:
    (copy / "checked.sched").write_text(CHECKED, encoding="utf-8")
    status, output = schedc("check", "checked.sched")
    assert (status, "24 ops on 2 ranks" in output) == (0, True), output
    assert "C gradient check" in schedc("show", "checked.sched", "--format", "term")[1]
    (copy / "early.sched").write_text(CHECKED.replace("B  C", "C  B"), encoding="utf-8")
    status, output = schedc("check", "early.sched")
    assert (status, "error[S204]: gradient check of microbatch 0 on stage 0 runs before" in output) == (1, True), output


def test_the_runtime_carries_both_out(copy: Path) -> None:
    (copy / "mine.sched").write_text(PLAN, encoding="utf-8")
    (copy / "checked.sched").write_text(CHECKED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", CARRIED_OUT],
        cwd=copy,
        env=environment(copy),
        capture_output=True,
        text=True,
        check=False,
    )
    status, output = done.returncode, done.stdout + done.stderr
    assert (status, output.splitlines()[0]) == (0, "{0.25}"), output
    assert "check passed" in output
