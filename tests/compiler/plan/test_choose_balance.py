"""`balance auto` takes the candidate with the shortest step, and says what each of them takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.diagnostics import DiagnosticError
from schedc.ir.arrays import Int64
from schedc.ir.plan import Balance
from schedc.ir.verify_plan import verify_plan
from schedc.plan.passes import lower
from schedc.report.choices import balance_text
from schedc.step.costs.hot_choice import rows_beside_hot
from support.copied_plans import CELLS, LAYERS, MICROBATCHES, RANKS, analysed, routed

SLOW = CELLS.replace("node = 6", "node = 18")
"""Slower links: copies by microbatch take longer."""


def steps(*seeds: int, skew: float = 1.0) -> Int64:
    return np.concatenate([routed(seed, skew) for seed in seeds])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "cells", "expected"),
    [
        (steps(0, 0), CELLS, "by step"),
        (steps(0, 5), SLOW, "by microbatch"),  # the wanted experts of the step before are others
        (steps(0, 5, skew=0.5), SLOW.replace("18", "60"), "none"),
        (np.full((2, LAYERS, MICROBATCHES, RANKS, 8), 16), CELLS, "none"),
    ],
    ids=["steady", "changing", "slow links", "even"],
)
def test_the_shortest_step_is_chosen(tmp_path: Path, rows: Int64, cells: str, expected: str) -> None:
    step = analysed(tmp_path, rows, "  balance auto", "1f1b", cells)
    assert step.balanced is not None
    priced = {each.name: each for each in step.balanced.candidates}
    assert list(priced) == ["none", "hot auto", "by step", "by microbatch"]
    others = {"none": "", "hot auto": "  hot auto"} | {by: f"  balance {by}" for by in ("by step", "by microbatch")}
    for name, line in others.items():
        alone = analysed(tmp_path, rows, line, "1f1b", cells)
        assert priced[name].makespan == lower(alone, "predicted").predicted.makespan, name
        assert priced[name].plan == alone.plan
    assert step.balanced.chosen.name == expected
    assert step.balanced.chosen.makespan == min(each.makespan for each in priced.values())
    assert step.schedule.plan == priced[expected].plan == step.program().plan
    told = list(balance_text(json.loads(json.dumps(_facts(tmp_path, cells)))))
    assert told[0].startswith(f"balance auto: {expected}, a step of {step.balanced.chosen.makespan:g}: ")
    assert [line[2:16].strip() for line in told[1:]] == list(priced)


def _facts(folder: Path, cells: str) -> dict[str, object]:
    (folder / "costs.toml").write_text(cells)
    text = (folder / "a.sched").read_text()
    (folder / "a.sched").write_text(text.replace("balance by microbatch", "balance auto"))
    asked = ["check", str(folder / "a.sched"), "--cost-file", str(folder / "costs.toml"), "--json"]
    result = CliRunner().invoke(main, [*asked, "--record", str(folder / "r.npz")])
    facts: dict[str, object] = json.loads(result.output)["balance_auto"]
    return facts


def test_without_rows_by_expert_nothing_is_measured(tmp_path: Path) -> None:
    """Copies last for a step then, unless they cannot be."""
    for cells in (CELLS, f"{CELLS}[cell.rows]\nimbalance = 1.4\n"):
        step = analysed(tmp_path, None, "  balance auto", cells=cells)
        assert step.plan.balance == Balance("step")
        assert step.balanced is not None
        assert (step.balanced.chosen.name, step.balanced.candidates) == ("by step", ())
        with pytest.raises(DiagnosticError) as caught:
            analysed(tmp_path, None, "  balance auto within 1.2", cells=cells)
        (finding,) = caught.value.diagnostics
        assert finding.code == "S158"
        assert "is by step: a limit of rows" in finding.message
    analysed(tmp_path, None, "  balance auto")
    asked = ["check", str(tmp_path / "a.sched"), "--cost-file", str(tmp_path / "costs.toml")]
    (tmp_path / "costs.toml").write_text(CELLS)
    assert "balance auto: by step; nothing was measured" in CliRunner().invoke(main, asked).output


def test_candidates_that_cannot_be_are_named(tmp_path: Path) -> None:
    """No columns of experts: copies have no size."""
    rows = steps(0, 0)
    analysed(tmp_path, rows, "  balance auto")
    text = (tmp_path / "a.sched").read_text()
    (tmp_path / "a.sched").write_text(text.replace(" width 16 hidden 32", ""))
    (tmp_path / "costs.toml").write_text(CELLS)
    asked = ["check", str(tmp_path / "a.sched"), "--cost-file", str(tmp_path / "costs.toml")]
    output = CliRunner().invoke(main, [*asked, "--record", str(tmp_path / "r.npz")]).output
    assert "balance auto: none, a step of" in output
    assert "by microbatch  not compared: that needs `tokens`, the sizes of `experts`" in output


def test_a_program_carries_a_choice(tmp_path: Path) -> None:
    step = analysed(tmp_path, steps(0, 0), "  balance auto")
    placement = step.schedule.placement
    assert not verify_plan(step.plan, placement)
    (finding,) = verify_plan(replace(step.plan, hot=None, balance=Balance("auto")), placement)
    assert "nobody has chosen" in finding.message


def test_rows_of_hot_experts_stay_with_their_tokens() -> None:
    rows = np.random.default_rng(0).integers(0, 9, (3, 4, 8))
    after = rows_beside_hot(rows, (1, 6))
    for table, load in zip(rows, after, strict=True):
        expected = [0] * 4
        for source in range(4):
            for expert in range(8):
                expected[source if expert in (1, 6) else expert // 2] += table[source, expert]
        assert load.tolist() == expected
