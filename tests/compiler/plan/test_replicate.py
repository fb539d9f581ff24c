"""`--replicas`: bytes, times and memory of what replicas do together, by hand, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.table import CellTable
from schedc.cli import main
from schedc.compiler import analyse, price
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.ir.works import WorkKind
from schedc.step.costs.costs import Costs

LINES = "layers 8  parameters dense 400 MB embedding 200 MB head 200 MB  activations dense 100 MB"

REPLICAS = ("--replicas", "8", "--cost", "dp=8")


def plan(tmp_path: Path, lines: str, schedule: str = "1f1b(P = 4, M = 8)") -> Path:
    path = tmp_path / "r.sched"
    path.write_text(f"plan r = {schedule} {{\n  {lines}\n}}\n")
    return path


def check(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["check", str(path), *options])


def facts(path: Path, *options: str) -> dict[str, Any]:
    result = check(path, *REPLICAS, "--json", *options)
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def test_sums_send_each_gradient_twice(tmp_path: Path) -> None:
    """Two layers per rank of 1F1B: only the last one's sum ends the step, and each rank waits for its own."""
    sums = facts(plan(tmp_path, LINES))["replicas"]
    sizes = [1.0, 0.8, 0.8, 1.0]
    assert [row["sent"] for row in sums["ranks"]] == pytest.approx([2 * 7 / 8 * size * 1e9 for size in sizes])
    assert [row["busy"] for row in sums["ranks"]] == pytest.approx([2 * 7 * size for size in sizes])
    assert [row["exposed"] for row in sums["ranks"]] == pytest.approx([2 * 7 * size for size in sizes])
    assert (sums["gathers"], sums["sums"], sums["count"], sums["same_experts"]) == (0, 4, 8, 8)
    assert sums["makespan"] == pytest.approx(sums["makespan_without"] + 14)


def test_compute_beside_a_busy_lane_takes_longer(tmp_path: Path) -> None:
    costs = tmp_path / "costs.toml"
    costs.write_text('schema = "schedc.costs/1"\n[lanes.dp]\nengine = "sm"\ninterference = 0.5\n')
    name = "interleaved_1f1b(P = 2, M = 4)"
    path = plan(tmp_path, LINES, name)
    alone, beside = (facts(path, *more)["replicas"] for more in ((), ("--cost-file", str(costs))))
    assert "engines" not in alone
    (engine,) = beside["engines"]
    assert beside["makespan"] == pytest.approx(alone["makespan"] / (1 - engine["slowed"]))
    assert engine["slowed"] > 0


def test_sharded_parameters_are_gathered_once_and_spread_no_gradients(tmp_path: Path) -> None:
    result = facts(plan(tmp_path, f"{LINES}  shard dense  memory 20 GB"))
    sums = result["replicas"]
    sizes = [1.0, 0.8, 0.8, 1.0]
    assert [row["sent"] for row in sums["ranks"]] == pytest.approx([2 * 7 / 8 * size * 1e9 for size in sizes])
    assert (sums["gathers"], sums["gathered_again"]) == (4, 0)
    # Rank r idles for r forwards of 2 before its first cell, so its gather of 7 * 0.8 is exposed for the rest of it.
    first = [row["exposed"] - 7 * size for row, size in zip(sums["ranks"], sizes, strict=True)]
    assert first == pytest.approx([7.0, 0.0, 0.0, 0.0])
    held = max(result["peak_memory"])
    assert held > 0.2e9 * 4 + 1e9 * sizes[0]  # activations and gathered weights, and what gradients take
    enough = plan(tmp_path, f"{LINES}  shard dense  memory {held / 1e9!r} GB")
    assert facts(enough)["peak_memory"] == result["peak_memory"]
    less = check(plan(tmp_path, f"{LINES}  shard dense  memory {held / 1e9 * 0.999!r} GB"), *REPLICAS)
    assert "S406" in less.output


def test_experts_are_summed_among_the_replicas_that_hold_the_same(tmp_path: Path) -> None:
    lines = "layers 8  experts 8 top 2 width 64 hidden 32  topology nodes 1 x 4  memory 20 GB  activations moe 1 MB"
    sums = facts(plan(tmp_path, lines))["replicas"]
    experts, router = 2 * 3 * 32 * 64 * 2, 8 * 32 * 2
    sent = 2 * 2 * (router * 7 / 8 + experts * 1 / 2)
    assert [row["sent"] for row in sums["ranks"]] == pytest.approx([sent] * 4)
    assert (sums["same_experts"], sums["sums"]) == (2, 8)
    with pytest.raises(DiagnosticError, match="6 replicas of a rank, and 4 ranks share the experts"):
        price(open_input(plan(tmp_path, lines)), {}, Costs(dp=1.0), 6)


def test_whole_parameters_fill_a_rank_until_they_are_dropped(tmp_path: Path) -> None:
    """A cap between that of every gather and that of no drop: what is gathered again keeps every cell within it."""
    name = "interleaved_1f1b(P = 2, M = 8)"
    free = price(open_input(plan(tmp_path, f"{LINES}  shard dense  memory 20 GB", name)), {}, Costs(dp=1.0), 8)
    most = 5.0
    tight = price(open_input(plan(tmp_path, f"{LINES}  shard dense  memory {most} GB", name)), {}, Costs(dp=1.0), 8)
    counts = [int((step.works.works.kind == WorkKind.GATHER).sum()) for step in (free, tight) if step.works]
    assert counts[0] == 4 < counts[1]
    with pytest.raises(DiagnosticError, match="whole parameters") as caught:
        price(open_input(plan(tmp_path, f"{LINES}  shard dense  memory 3 GB", name)), {}, Costs(dp=1.0), 8)
    assert caught.value.diagnostics[0].code == "S406"


@pytest.mark.parametrize(
    ("lines", "costs", "message"),
    [
        (LINES, Costs(), "the costs give no dp"),
        ("layers 8", Costs(dp=1.0), "nothing says how many bytes 8 replicas sum"),
        ("", Costs(dp=1.0), "nothing says how many bytes 8 replicas of `1f1b` sum"),
    ],
)
def test_what_has_no_time_or_no_bytes_is_refused(tmp_path: Path, lines: str, costs: Costs, message: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        price(open_input(plan(tmp_path, lines) if lines else "1f1b"), {}, costs, 8)
    (finding,) = caught.value.diagnostics
    assert (finding.code, message in finding.message) == ("S410", True)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ("parallel dp 4", "8 replicas, and cp 1 x dp 4 ranks hold the same dense parameters"),
        ("parallel cp 4 dp 4  shard dense", "`shard dense` beside zero 0"),
        ("parallel dp 8 zero 3", "zero 3, and nothing says whether `parameters` are those before sharding"),
    ],
)
def test_what_contradicts_the_devices_of_a_plan_is_refused(tmp_path: Path, parallel: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        price(open_input(plan(tmp_path, f"{LINES}  {parallel}")), {}, Costs(dp=1.0), 8)
    (finding,) = caught.value.diagnostics
    assert (finding.code, message in finding.message) == ("S156", True)


def test_zero_3_beside_shard_dense_is_shard_dense(tmp_path: Path) -> None:
    """The same works at the same places; cp ranks hold the same parameters as dp ranks do."""
    lines = ("shard dense", "shard dense  parallel dp 8 zero 3", "shard dense  parallel cp 2 dp 4 zero 3")
    works = [price(open_input(plan(tmp_path, f"{LINES}  {line}")), {}, Costs(dp=1.0), 8).works for line in lines]
    places = [(each.placed.start.tolist(), each.placed.join.tolist()) for each in works if each is not None]
    assert len(places) == 3
    assert places[0] == places[1] == places[2]
    assert all((each.works.kind == WorkKind.GATHER).any() for each in works if each is not None)


def test_the_step_from_inside_has_the_works(tmp_path: Path) -> None:
    """Where cells of dense layers send at their ends, the step is that of their ops, sums behind the last cell too."""
    file = tmp_path / "a.sched"
    lines = "layers 4  parameters dense 10  shard dense"
    file.write_text(f"sched 1\nplan a = 1f1b(P = 2, M = 4) {{ {lines} }}\n", encoding="utf-8")
    table = CellTable(CellCosts.of({"dense": SegmentTimes(1.0, 1.0, 1.0)}, {}))
    analysis = analyse(str(file), {}, Costs(cell=table, dp=0.1), 2)
    assert analysis.replication is not None
    assert analysis.inside is not None
    assert analysis.inside.serial.makespan == pytest.approx(analysis.replication.makespan)
    assert analysis.inside.works is not None
    assert analysis.inside.works.lanes["dp"][0] == pytest.approx(analysis.replication.time.sum())


@pytest.mark.parametrize(("shard", "most"), [("", 16 + 16), ("shard dense", 16 / 4 + 16 + 16 + 16)])
def test_memory_beside_sums_and_gathers(tmp_path: Path, shard: str, most: float) -> None:
    """By hand, behind the last backward of a rank with 16 GB of weights: the weights, and their gradients in buckets.

    Four replicas that shard hold a quarter of the weights, gradients for the step, and the weights gathered as well.
    """
    lines = f"layers 4 parameters dense 8 GB activations dense 1 GB memory 999 GB {shard}"
    step = price(open_input(str(plan(tmp_path, lines, "1f1b(P = 2, M = 4)"))), {}, Costs(dp=0.1), 4)
    assert step.bytes is not None
    assert step.bytes.peak.tolist() == pytest.approx([most * 1e9] * 2)
