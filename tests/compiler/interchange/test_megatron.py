"""Flags of Megatron for a schedule, its layout and its plan, and what Megatron cannot take."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedc.cli import main
from support.plan_cases import written


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_megatron_flags() -> None:
    def flags(*arguments: str) -> list[str]:
        result = schedc("export", *arguments, "--to", "megatron")
        assert result.exit_code == 0, result.output
        return [line for line in result.stdout.splitlines() if not line.startswith("#")]

    assert flags("1f1b", "-D", "P=8") == ["--pipeline-model-parallel-size 8"]
    interleaved = [
        "--pipeline-model-parallel-size 4",
        "--num-virtual-stages-per-pipeline-rank 3",
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
    ]
    assert flags("interleaved_1f1b", "-D", "v=3") == interleaved
    placed = flags("interleaved_1f1b", "-D", "P=2", "--layout", "E t*3|tt,noop|tt|ttmL")
    assert placed == [
        "--pipeline-model-parallel-size 2",
        "--num-layers 9",
        "--mtp-num-layers 1",
        '--pipeline-model-parallel-layout "Ettt|tt|tt|ttmL"',
        "--microbatch-group-size-per-virtual-pipeline-stage 2",
    ]
    assert flags("interleaved_overlap", "-D", "v=3") == [*interleaved, "--overlap-moe-expert-parallel-comm"]


SPREAD = """layers 4  experts 8 top 2  {parallel}
  batch 32 x 128 by 2"""


def test_megatron_flags_of_a_plan_that_spreads_a_step(tmp_path: Path) -> None:
    """The names are those of `megatron/training/arguments.py`; Megatron needs the sequence split beside experts."""

    def export(parallel: str) -> Result:
        return schedc("export", written(tmp_path, SPREAD.format(parallel=parallel)), "--to", "megatron")

    lines = export("parallel tp 2 of attention cp 2 ep 8 dp 4 zero 1").stdout.splitlines()
    assert lines[1] == "# For 32 processes."
    assert lines[5:] == [
        "--tensor-model-parallel-size 2",
        "--sequence-parallel",
        "--context-parallel-size 2",
        "--expert-model-parallel-size 8",
        "--expert-tensor-parallel-size 1",
        "--use-distributed-optimizer",
        "--micro-batch-size 2",
        "--global-batch-size 32",
        "--seq-length 128",
    ]
    assert "--expert-tensor-parallel-size 2" in export("parallel tp 2 ep 4 dp 4").stdout
    assert "S607" in export("parallel dp 4 zero 3").stderr


@pytest.mark.parametrize(
    ("layout", "status", "said"),
    [
        ("Et|tL", 1, "the layout has 2 stages, 1f1b has 4"),
        ("Et|t|m|mL", 1, "multi-token predictions in several stages"),
        ("Ex|t|t|L", 2, "error[S140]"),
    ],
)
def test_a_layout_that_megatron_cannot_take(layout: str, status: int, said: str) -> None:
    result = schedc("export", "1f1b", "--to", "megatron", "--layout", layout)
    assert result.exit_code == status
    assert said in result.stderr
    assert schedc("export", "1f1b", "--to", "csv", "--layout", layout).exit_code == 2
