"""Costs of packed rows by `schedc calibrate --lengths`: rows of known times, the file, and rows that tell nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import schedc
from schedc.cli import main as schedc_main
from schedc.ir.json import program_to_json
from schedc.step.costs.costs import Costs
from schedc_runtime.commands import calibrate
from schedc_runtime.data import RowCosts
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.measure.row_times import RowTimes, check_apart, milliseconds, read_lengths
from support import row_cases
from support.sweeps import in_sweeps, swept

VOCAB = 16
KNOWN = RowCosts.of_milliseconds(squared=3e-3, linear=2e-2, constant=0.7)
ROWS = "64\n32 32  # two documents\n16,16,16,16\n48\n\n24 24\n8\n"
CLOCK = [0.0]
"""Milliseconds on the clock of a test."""


@torch.library.custom_op("schedc_tests::clocked", mutates_args=())
def clocked(x: Tensor, documents: Tensor, share: float) -> Tensor:
    """The values of x, after a share of the known time of a packed row."""
    sizes = documents.flatten().unique_consecutive(return_counts=True)[1]
    CLOCK[0] += share * float(KNOWN.milliseconds([sizes.tolist()])[0])
    return x.clone()


clocked.register_fake(lambda x, documents, share: torch.empty_like(x))
clocked.register_autograd(
    lambda ctx, grad: (clocked(grad, ctx.documents, 2 * ctx.share), None, None),
    setup_context=lambda ctx, inputs, output: ctx.__dict__.update(documents=inputs[1], share=inputs[2]),
)


class Clocked(nn.Module):
    """Two blocks. A forward and a backward of both take the known time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB)
        self.blocks = nn.ModuleList([ClockedBlock(), ClockedBlock()])

    def forward(self, tokens: Tensor, documents: Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, documents)
        return self.head(x)


class ClockedBlock(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:  # type: ignore[override]
        return clocked(super().forward(x), documents, 1 / 6)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("mine")
    batch = {"tokens": torch.full((1, 4), VOCAB - 1), "documents": torch.zeros(1, 4, dtype=torch.int32)}
    module.model = lambda: (Clocked(), row_cases.mean, batch, batch["tokens"])  # type: ignore[attr-defined]
    module.bare = lambda: (Clocked(), row_cases.mean, batch["tokens"], batch["tokens"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    monkeypatch.setattr("schedc_runtime.measure.stage_times.time.perf_counter_ns", lambda: round(CLOCK[0] * 1e6))
    return module


def calibrated(folder: Path, schedule: str, rows: str, *options: str) -> int:
    (folder / "rows.txt").write_text(rows)
    (folder / "program.json").write_text(program_to_json(schedc.compile(schedule, P=2, M=4)))
    few = ["--repetitions", "1", "--warmup", "1"]
    return calibrate.main(
        ["--program", str(folder / "program.json"), "--lengths", str(folder / "rows.txt"), *few, *options]
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_rows_of_known_times_give_their_costs(mine: ModuleType, tmp_path: Path, schedule: str) -> None:
    path = tmp_path / "costs.toml"
    assert calibrated(tmp_path, schedule, ROWS, "--model", "mine:model", "-o", str(path)) == 0
    found, rows = RowCosts.open(path), read_lengths(tmp_path / "rows.txt")
    assert rows == [(64,), (32, 32), (16,) * 4, (48,), (24, 24), (8,)]
    for name in ("squared", "linear", "constant"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3), name
    assert found.error < 1e-3
    text = path.read_text()
    assert text.startswith("# Milliseconds on ")
    assert "mine:model." in text
    time = float(KNOWN.milliseconds([(32, 32)])[0])
    assert f"# 64 tokens in documents: 2. Measured {time:.4g} ms, fitted {time:.4g} ms.\n" in text
    assert "# error: the largest |fitted / measured - 1| of 6 rows: 0.0%.\n" in text
    assert "whole rows" not in text


def test_a_whole_backward_counts_where_it_was_timed() -> None:
    assert milliseconds(Costs(F=(1.0, 2.0), I=(3.0, 4.0), W=(5.0, 6.0))) == 21.0
    assert milliseconds(Costs(F=(1.0, 2.0), I=(3.0, 4.0), W=(5.0, 6.0), B=(7.0, 8.0))) == 18.0


def test_attention_over_whole_rows_is_told() -> None:
    rows = [(64,), (32, 32), (16,) * 4, (48,), (24, 24), (8,)]
    dense = RowTimes.of(rows, KNOWN.milliseconds([(sum(row),) for row in rows]).tolist())
    assert dense.costs.error > 0.1
    assert list(dense.about())[-1].startswith("Squares of whole rows fit better, 0.0%")
    assert "all rows cost the same" in list(RowTimes.of(rows, [5.0] * 6).about())[-2]
    alone = [(64,), (48,), (8,)]
    assert "No row has several documents" in list(RowTimes.of(alone, KNOWN.milliseconds(alone).tolist()).about())[-1]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(64,), (32, 32)], "2 rows give no three costs"),
        ([(64,), (32, 32), (16, 48)], "cannot tell `linear` apart"),
        ([(8,), (8, 8), (8, 8, 8)], "cannot tell `squared` apart"),
    ],
)
def test_rows_that_tell_nothing_are_refused(rows: list[tuple[int, ...]], says: str) -> None:
    with pytest.raises(RuntimeFault, match=says):
        check_apart(rows)


def test_what_is_no_row_and_no_model_of_packed_rows(
    mine: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rows, says in (("64\n32 x\n", "rows.txt, line 2: `32 x` has no lengths"), ("64\n0 3\n", "line 2: `0 3`")):
        assert calibrated(tmp_path, "1f1b", rows, "--model", "mine:model") == 1
        assert says in capsys.readouterr().err
    assert calibrated(tmp_path, "1f1b", ROWS, "--model", "mine:bare") == 1
    assert "the batch of the model has no documents" in capsys.readouterr().err
    done = CliRunner().invoke(
        schedc_main, ["calibrate", "1f1b", "--only", "sums", "--lengths", str(tmp_path / "rows.txt")]
    )
    assert (done.exit_code, "--only and --lengths exclude each other" in done.output) == (2, True)


@pytest.mark.parametrize(
    "text", ['schema = "schedc.costs/1"', KNOWN.text().replace("linear", "lines"), KNOWN.text() + "more = 1\n", "= 3"]
)
def test_files_without_costs_of_rows_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(KNOWN.text())
    assert RowCosts.open(path) == KNOWN
    path.write_text(text)
    with pytest.raises(RuntimeFault, match="costs"):
        RowCosts.open(path)


@in_sweeps("runtime/commands/test_calibrate.py::test_calibrate_check_run")
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("toy", ["moe", *swept(["gpt"], [])])
def test_toy_models_take_packed_rows(tmp_path: Path, toy: str) -> None:
    path = tmp_path / "costs.toml"
    assert calibrated(tmp_path, "dualpipev", ROWS, "--toy", toy, "--width", "8", "-o", str(path)) == 0
    assert RowCosts.open(path).of([(64,)])[0] > 0
