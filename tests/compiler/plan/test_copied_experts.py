"""Copies of experts even the recorded rows of a step, take their time in its cells, and are reported."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cell.issue_order import scope
from schedc.cell.recorded_rows import write_recording
from schedc.cli import main
from schedc.compiler import Analysis, analyse
from schedc.ir.arrays import Int64
from schedc.plan.counts.copied_experts import copies_facts, copy_time
from schedc.source import Source
from schedc.step.costs.costs import parse_costs
from schedc.step.costs.forest import NUMPY, forest_of, rows_on_ranks

LINES = """  layers 4
  experts 8 top 2 width 16 hidden 32
  topology nodes 1 x 4 node 400 GB/s
  tokens 64 dtype bf16
  alltoall flat
"""
CELLS = """schema = "schedc.costs/1"
[cell]
attention = {F = 20, I = 20, W = 20}
experts = {F = 20, I = 20, W = 20}
dispatch = {node = 6}
combine = {node = 6}
"""
LAYERS, MICROBATCHES, RANKS, EXPERTS = 4, 5, 4, 8
PER_ROW = 6 / (64 * 2 * 3 / 4)
"""Time of a row on the link: a dispatch of 6 sends three quarters of 128 rows."""
COPY = 3 * 16 * PER_ROW
"""Three matrices of 16 columns are 48 rows. Their gradients in float32 are twice as many."""


def routed(seed: int = 0, skew: float = 1.0) -> Int64:
    """[1, layers, microbatches, ranks, experts] rows of tokens with two choices each."""
    generator = np.random.default_rng(seed)
    share = np.arange(1, EXPERTS + 1) ** -skew
    drawn = [
        generator.multinomial(128, generator.permutation(share / share.sum()), (MICROBATCHES, RANKS))
        for _ in range(LAYERS)
    ]
    return np.array(drawn)[None]


def analysed(
    folder: Path, rows: Int64 | None, line: str = "", schedule: str = "zbh1", cells: str = CELLS, lines: str = LINES
) -> Analysis:
    (folder / "a.sched").write_text(
        f"sched 1\n\nplan a = {schedule}(P = 2, M = {MICROBATCHES}) {{\n{lines}{line}\n}}\n"
    )
    if rows is not None:
        write_recording(folder / "r.npz", rows)
        cells += '[cell.rows]\nrecorded = "r.npz"\n'
    return analyse(folder / "a.sched", {}, parse_costs(Source(str(folder / "costs.toml"), cells)))


def computed(rows: Int64, within: str = "1.01") -> tuple[Int64, Int64, Int64]:
    """(rows of ranks, copies that a rank holds, copies that it sends), [layers, microbatches, ranks] each."""
    homes = rows[-1].sum(axis=2).reshape(LAYERS, MICROBATCHES, RANKS, -1)
    on_ranks = rows_on_ranks(NUMPY, homes, forest_of(homes, Fraction(within)))
    away = on_ranks * ~np.eye(RANKS, dtype=bool)[..., None] > 0
    return on_ranks.sum((3, 4)), away.sum((3, 4)), away.sum((2, 4))


def test_facts_are_those_of_the_closed_form(tmp_path: Path) -> None:
    rows = routed()
    load, held, sent = computed(rows)
    step = analysed(tmp_path, rows, "  balance by microbatch")
    assert step.costs.cell is not None
    assert step.costs.cell.rows is not None
    facts = copies_facts(step.plan, step.costs.cell.costs, step.costs.cell.rows)
    most = load.max(axis=2) / 128
    assert facts["after"] == {"mean": pytest.approx(most.mean()), "worst": pytest.approx(most.max())}
    assert facts["fullest"]["worst"] > 1.3 > facts["after"]["worst"]
    assert facts["held"] == held.mean() > 0
    assert facts["sent"] == sent.max(axis=2).mean()
    assert facts["bytes"] == pytest.approx(facts["sent"] * (2 + 4) * 3 * 16 * 32)
    assert facts["unpriced"] is None


def test_rows_move_inside_nodes(tmp_path: Path) -> None:
    """Each node plans for itself, and copies take the links of the node beside rows that cross nodes."""
    rows = routed()
    homes = rows[-1].sum(axis=2).reshape(LAYERS, MICROBATCHES, 2, 2, -1)
    most = np.ceil(homes.sum((3, 4)) / 2).max(axis=2) / 128
    lines = LINES.replace("1 x 4 node 400 GB/s", "2 x 2 node 400 GB/s rail 50 GB/s")
    cells = CELLS.replace("node =", "rail =") + "hot = {node = 3}\n"
    step = analysed(tmp_path, rows, "  balance by microbatch within 1", cells=cells, lines=lines)
    assert step.costs.cell is not None
    assert step.costs.cell.rows is not None
    facts = copies_facts(step.plan, step.costs.cell.costs, step.costs.cell.rows)
    assert facts["after"] == {"mean": pytest.approx(most.mean()), "worst": pytest.approx(most.max())}
    (shape, *_) = step.costs.cell.shapes(2)
    hot = shape.names.index("0.hot.node")
    assert (shape.queues[hot], scope(shape, hot)) == ("node", "lane")
    assert facts["unpriced"] is None


def test_copies_beside_two_hops_are_as_fast_as_rows_in_the_node(tmp_path: Path) -> None:
    lines = LINES.replace("1 x 4 node 400 GB/s", "2 x 2 node 400 GB/s rail 50 GB/s").replace("flat", "hierarchical")
    cells = CELLS.replace("node = 6", "rail = 9, node = 6")
    step = analysed(tmp_path, routed(), "  balance by microbatch", cells=cells, lines=lines)
    assert step.costs.cell is not None
    time = copy_time(step.plan, step.costs.cell.costs)
    assert time is not None
    pairs = 8 * 7 / 2
    missed = 6 * 5 / 2 / pairs  # both choices are on other ranks
    assert time.forward == pytest.approx(3 * 16 * 6 / (64 * 2 * (1 - missed)))


def test_copies_take_their_time_in_their_cells(tmp_path: Path) -> None:
    """A copy that leaves one home in layer 2 of microbatch 3 takes the link there, forward and behind W."""
    rows = np.full((1, LAYERS, MICROBATCHES, RANKS, EXPERTS), 16)
    rows[0, 2, 3, :, 0] += 12
    rows[0, 2, 3, :, 7] -= 12
    even = np.full_like(rows, 16)
    balanced = analysed(tmp_path, rows, "  balance by microbatch within 1").inside
    plain = analysed(tmp_path, even).inside
    assert balanced is not None
    assert balanced.group is not None
    assert plain is not None
    assert plain.group is not None
    assert np.allclose(balanced.group.rows, 1)
    more = (balanced.group.carried - plain.group.carried).sum(axis=0)
    changed = np.flatnonzero((np.abs(more) > 1e-9).any(axis=1))
    dependencies = balanced.late_wait.dependencies
    ops = {str(dependencies.schedule.op(int(dependencies.first[cell]))) for cell in changed}
    assert ops == {"1F3", "1W3"}
    assert more[changed] == pytest.approx(np.full((2, RANKS), [[COPY], [2 * COPY]]))


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_busiest_ranks_set_the_time(tmp_path: Path, schedule: str) -> None:
    rows = routed(1)
    load, held, sent = computed(rows, "1.05")
    balanced = analysed(tmp_path, rows, "  balance by microbatch within 1.05", schedule).inside
    as_computed = np.zeros_like(rows)
    as_computed[0, :, :, 0, ::2] = load  # the same rows by rank, without a copy
    plain = analysed(tmp_path, as_computed, "", schedule).inside
    uneven = analysed(tmp_path, rows, "", schedule).inside
    assert balanced is not None
    assert balanced.group is not None
    assert plain is not None
    assert plain.group is not None
    assert uneven is not None
    assert np.allclose(balanced.group.compute, plain.group.compute)
    copies = np.maximum(held, sent).max(axis=2).sum()
    more = (balanced.group.carried - plain.group.carried).sum(axis=(0, 1))
    assert more == pytest.approx(np.full(RANKS, 3 * COPY * copies))
    assert plain.late_wait.makespan < balanced.late_wait.makespan < uneven.late_wait.makespan


@pytest.mark.parametrize(
    ("table", "most"),
    [("imbalance = 1.4", 1.01), ("per_rank = [1.6, 0.4, 1.0, 1.0]", 1.01), ("per_rank = [1, 1, 1, 1]", 1.0)],
)
def test_rows_without_experts_are_evened_and_copies_are_said_to_be_unknown(
    tmp_path: Path, table: str, most: float
) -> None:
    step = analysed(tmp_path, None, "  balance by microbatch", cells=f"{CELLS}[cell.rows]\n{table}\n")
    assert step.inside is not None
    assert step.inside.group is not None
    assert step.inside.group.rows.max() == pytest.approx(most, abs=1e-6)
    assert step.costs.cell is not None
    assert step.costs.cell.rows is not None
    facts = copies_facts(step.plan, step.costs.cell.costs, step.costs.cell.rows)
    assert facts["sent"] is None
    assert "say no experts" in facts["unpriced"]


def test_in_place_rows_stay_uneven_and_nothing_travels(tmp_path: Path) -> None:
    rows = routed()
    in_place = analysed(tmp_path, rows, "  balance by microbatch in place").inside
    plain = analysed(tmp_path, rows).inside
    assert in_place is not None
    assert plain is not None
    assert in_place.late_wait.makespan == plain.late_wait.makespan


def test_check_tells_what_is_priced(tmp_path: Path) -> None:
    analysed(tmp_path, routed(), "  balance by microbatch")
    (tmp_path / "costs.toml").write_text(CELLS)
    asked = ["check", str(tmp_path / "a.sched"), "--cost-file", str(tmp_path / "costs.toml")]
    record = ["--record", str(tmp_path / "r.npz")]
    facts = json.loads(CliRunner().invoke(main, [*asked, *record, "--json"]).output)["plan"]["balance"]["rows"]
    text = CliRunner().invoke(main, [*asked, *record]).output
    assert f"{facts['after']['mean']:.3f} (worst {facts['after']['worst']:.3f}) with them" in text
    assert f"{facts['sent']:.2f} leave the busiest home" in text
    assert "rows are taken for even and copies for none" in CliRunner().invoke(main, asked).output
