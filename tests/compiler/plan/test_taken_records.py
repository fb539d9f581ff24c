"""A record of other sizes than those of the plan is taken for these, and `check` says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedc.compiler import Analysis
from schedc.diagnostics import DiagnosticError
from schedc.ir.arrays import Int64
from schedc.plan.counts.copied_experts import copies_facts
from schedc.plan.passes import lower
from schedc.report import check
from schedc.report.records import table_of
from support.copied_plans import LAYERS, LINES, MICROBATCHES, RANKS, analysed, routed
from support.sweeps import halved

REPEATED = np.arange(MICROBATCHES) % 2
"""The microbatches of a step, of a record of two."""


def copies(step: Analysis) -> dict[str, Any]:
    table = table_of(step)
    assert table is not None
    assert table.rows is not None
    return copies_facts(step.plan, table.costs, table.rows)


def steps(skew: float) -> Int64:
    return np.concatenate([routed(1, skew), routed(2, skew)])


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("line", halved(["", "  hot auto", "  balance by step", "  balance by microbatch"]))
def test_a_record_that_repeats_is_priced_as_one_period(tmp_path: Path, line: str) -> None:
    """Copies of a step pay from their rows in all microbatches."""
    wide = LINES.replace("width 16", "width 512")
    for skew, lines in ((1.0, LINES), (0.3, LINES), (1.0, wide)):
        rows = steps(skew)
        whole = analysed(tmp_path, rows[:, :, REPEATED], line, lines=lines)
        short = analysed(tmp_path, rows[:, :, :2], line, lines=lines)
        expected = lower(whole, "predicted").predicted.makespan
        assert lower(short, "predicted").predicted.makespan == pytest.approx(expected, rel=1e-12)
        assert copies(short) == copies(whole)


def test_both_sizes_are_told(tmp_path: Path) -> None:
    rows = steps(1.0)
    short = check.to_json(analysed(tmp_path, rows[:, :, :2]))
    assert short["record"] == {
        "known": {"layers": LAYERS, "microbatches": 2, "ranks": RANKS, "rows": 128},
        "taken": {"layers": LAYERS, "microbatches": MICROBATCHES, "ranks": RANKS, "rows": 128},
    }
    told = "record of 4 layers, 2 microbatches and 4 ranks of 128 rows is taken for 4 layers, 5 microbatches and"
    assert told in check.to_text(short, every_rank=False)
    assert "record" not in check.to_json(analysed(tmp_path, rows))


def test_a_record_of_other_experts_is_refused(tmp_path: Path) -> None:
    rows = np.concatenate([routed(), routed()], axis=4)
    with pytest.raises(DiagnosticError, match="16 experts, the plan 8"):
        lower(analysed(tmp_path, rows), "predicted")
