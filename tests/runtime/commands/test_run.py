"""`schedc run`: options that would do nothing are refused, and small models fit their plans."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import schedc
from schedc.diagnostics import Source
from schedc.inputs import Text
from schedc.ir.contradictions import first_contradiction
from schedc.ir.json import program_to_json
from schedc_runtime.commands.run import main
from schedc_runtime.commands.toy_models import toy_model, toy_plan
from schedc_runtime.models.gpt import GPT
from schedc_runtime.tensor_parallel.styles import cores_of, styled_modules


@pytest.mark.parametrize(
    ("ranks", "options", "why"),
    [
        (2, ["--restarts", "2"], "need --checkpoints"),
        (2, ["--durable", "5"], "need --checkpoints"),
        (2, ["--checkpoints", "runs", "--restarts", "2", "--in-process"], "--in-process has one"),
        (1, ["--checkpoints", "runs", "--restarts", "2"], "this program has one"),
        (2, ["--checkpoints", "runs", "--check", "bitwise"], "compares from the first step"),
    ],
)
def test_options_of_checkpoints_that_would_do_nothing_are_refused(
    ranks: int, options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.json"
    path.write_text(program_to_json(schedc.compile("1f1b", P=ranks, M=4)))
    with pytest.raises(SystemExit):
        main(["--program", str(path), *options])
    assert why in capsys.readouterr().err


SHARED = """sched 1
plan shared = 1f1b(P = 2, M = 4) {
  layers 4
  experts 8 top 2 width 16 hidden 32
  attention 25 KB
  tokens 64 dtype bf16
  parallel tp 2 of attention ep 2 dp 1
}
"""


def test_a_plan_with_tensor_ranks_has_no_bits_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = schedc.compile(Text(Source("shared.sched", SHARED)))
    path = tmp_path / "program.json"
    path.write_text(program_to_json(program))
    assert main(["--program", str(path), "--check", "bitwise"]) == 1
    assert "--check bitwise and 2 tensor ranks" in capsys.readouterr().err
    assert first_contradiction(toy_plan(program.plan)) == ""


def test_a_plan_with_context_ranks_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SHARED.replace("  experts 8 top 2 width 16 hidden 32\n  attention 25 KB\n", "")
    program = schedc.compile(Text(Source("shared.sched", text.replace("tp 2 of attention ep 2", "tp 1 cp 2"))))
    path = tmp_path / "program.json"
    path.write_text(program_to_json(program))
    assert main(["--program", str(path)]) == 1
    said = capsys.readouterr().err
    assert "`cp 2` in the plan" in said
    assert "write `cp 1`" in said


def test_tensor_ranks_share_a_model_with_styles() -> None:
    text = SHARED.replace("  experts 8 top 2 width 16 hidden 32\n  attention 25 KB\n", "")
    text = text.replace(" of attention ep 2", "")
    program = schedc.compile(Text(Source("shared.sched", text)))
    options = argparse.Namespace(seed=0, blocks=None, dense=0, width=32, tokens=8, rows=1)
    model = toy_model("gpt", program, toy_plan(program.plan), options).model
    assert isinstance(model, GPT)
    assert len(cores_of(list(styled_modules(model, model._tp_plan)), "head")) == 2 * 4
