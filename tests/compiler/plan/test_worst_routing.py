"""Plans whose ranks fit at the mean rows alone are warned of: the figure is that of the worst routing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cli import main
from schedc.compiler import analyse
from schedc.ir.plan import Balance, ExpertSizes, Method, Plan, Topology
from schedc.plan.counts.layers import counted_layer
from schedc.plan.counts.rows import most_computed, worst_case_rows
from schedc.plan.worst_routing import worst_routing
from schedc.step.costs.forest import NUMPY, rows_on_ranks
from schedc.step.costs.step_copies import QuotaTables, divided, quotas_of
from schedc.units import shown

LINES = """layers 4
experts 8 top 2 width 64 hidden 32
topology nodes 2 x 2 node 400 GB/s rail 50 GB/s
tokens 512 dtype bf16
parameters dense 1 GB moe 1 GB
activations dense 0 MB moe 0.9 MB"""
LAYERS, IN_FLIGHT = 2, 2
"""What rank 0 holds at its peak: the layers of its stage, for so many microbatches."""


def checked(folder: Path, line: str, memory: str) -> dict[str, Any]:
    """The facts of `schedc check` for a plan, beside the output for people under `text`."""
    body = "\n".join(f"  {each}" for each in (*LINES.splitlines(), *line.splitlines(), f"memory {memory}"))
    path = folder / "a.sched"
    path.write_text(f"sched 1\n\nplan a = 1f1b(P = 2, M = 4) {{\n{body}\n}}\n")
    runs = [CliRunner().invoke(main, ["check", str(path), *more]) for more in (["--json"], [])]
    assert [run.exit_code for run in runs] == [0, 0], runs[1].output
    facts: dict[str, Any] = json.loads(runs[0].output)
    return facts | {"text": runs[1].output}


@pytest.mark.parametrize("line", ["balance by step", "balance by microbatch", "sizes bounded 1.5"])
def test_the_figure_is_that_of_the_worst_routing(tmp_path: Path, line: str) -> None:
    large = checked(tmp_path, line, "900 GB")
    assert large["plan"]["warnings"] == []
    step = analyse(tmp_path / "a.sched", {})
    layer, most = counted_layer(step.plan, True), worst_case_rows(step.plan)
    assert layer is not None
    assert most is not None
    assert step.bytes is not None
    share = layer.held(rows=most) / layer.held() - 1
    assert share > 0
    needed = step.bytes.peak[0] + IN_FLIGHT * LAYERS * share * 0.9e6
    fits = step.bytes.peak.max() + 1
    facts = checked(tmp_path, line, f"{fits / 1e6:.6f} MB")
    (warning,) = facts["plan"]["warnings"]
    assert warning["code"] == "S413"
    assert warning["line"] == 11
    assert warning["message"].startswith(f"rank 0 could hold {shown(needed, up=True)} at 0")
    assert f"{most.experts / 2:.3g} times the mean rows" in warning["message"]
    assert "`recompute adaptive 1.2`" in warning["help"]
    assert f"warning[S413] at {tmp_path / 'a.sched'}:11: {warning['message']}; {warning['help']}" in facts["text"]
    assert checked(tmp_path, line, f"{(needed + 1) / 1e6:.6f} MB")["plan"]["warnings"] == []


def test_nobody_is_warned_where_rows_are_none_of_the_plan(tmp_path: Path) -> None:
    """Without copies and bounds `check` says nothing of rows; levels without rows of experts hold none more."""
    for line in ("alltoall flat", "balance by step\nrecompute layer"):
        checked(tmp_path, line, "900 GB")
        step = analyse(tmp_path / "a.sched", {})
        assert step.bytes is not None
        facts = checked(tmp_path, line, f"{(step.bytes.peak.max() + 1) / 1e6:.6f} MB")
        assert facts["plan"]["warnings"] == [], line
        assert worst_routing(step.lines.tree, step.held, step.dependencies, None) is None if step.lines else False


def test_a_rank_may_take_rows_for_ranks_below_it() -> None:
    """100 tokens choose both experts of rank 0, and the expert of rank 1 that ranks 2 and 3 have no copy of."""
    topology, balance = Topology(1, 4), Balance("step")
    plan = Plan(experts=ExpertSizes(8, 3), topology=topology, tokens=25, balance=balance, method=Method.FLAT)
    parent, below, borrowed, peers = quotas_of(((), (0, 1), (2,), (2,)), 2)
    tables = QuotaTables(np.array(parent), np.array(below), np.array(borrowed), peers)
    rows = np.array([[100, 100], [0, 100], [0, 0], [0, 0]])
    computed = rows_on_ranks(NUMPY, rows, divided(NUMPY, rows, tables)[0]).sum((1, 2))
    assert computed.max() == most_computed(plan) == 225 > 4 * 2 * 25
    slots = replace(plan, balance=Balance(slots=1))
    assert [Balance(slots=slots).copies(4, 8) for slots in (None, 3, 9)] == [4, 3, 4]
    assert (most_computed(slots), most_computed(replace(plan, balance=Balance()))) == (200, 76)
