"""Policies under costs with a table of cells: choices are judged by the step that is priced from inside."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.elaborate.computed_cases import orders, tree_of
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.table import CellTable
from schedc.claims.sweep import sweep
from schedc.cli import main
from schedc.compiler import analyse, legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.ops import OpKind
from schedc.load.library import open_schedule
from schedc.plan.order import order_pricer
from schedc.plan.price_cells import op_times, price_order
from schedc.step.costs.costs import Costs, load_costs
from schedc.step.dependencies import Dependencies

CELLS = Path(__file__).parents[3] / "examples" / "costs" / "cells.toml"
TIMES = st.integers(0, 40).map(float)
BLOCKS = st.lists(st.sampled_from(("dense", "moe")), max_size=2).map(tuple)


@st.composite
def cell_costs(draw: st.DrawFn, stages: int) -> Costs:
    """Any times inside of stages that differ, stages of paddings and exchanges without time among them."""
    segments = {
        role: SegmentTimes(draw(TIMES), draw(TIMES), draw(TIMES)) for role in ("attention", "experts", "dense", "post")
    }
    exchanges = {name: draw(TIMES) for name in ("dispatch.rail", "combine.rail", "dispatch.node")}
    blocks = tuple(draw(BLOCKS) for _ in range(stages))
    table = CellTable(CellCosts.of(segments, exchanges), blocks, draw(st.sampled_from(("flat", "hierarchical"))))
    return Costs(F=draw(TIMES), p2p=draw(st.sampled_from((0.0, 3.0))), cell=table)


def inside(name: str, sizes: dict[str, int], costs: Costs) -> tuple[float, float]:
    """Makespan and longest span of the step priced from inside."""
    timeline = price_order(Dependencies.of(legal_schedule(open_schedule(name), sizes, costs)), costs)
    return timeline.makespan, float(timeline.span.max())


@pytest.mark.slow
@settings(max_examples=6)
@given(st.data(), st.sampled_from((2, 3)), st.integers(1, 2))
def test_the_adaptive_pipe_is_never_slower_inside(data: st.DataObject, P: int, rounds: int) -> None:
    costs, sizes = data.draw(cell_costs(2 * P)), {"P": P, "M": P * rounds}
    fixed = [inside(name, sizes, costs)[0] for name in ("interleaved_overlap", "interleaved_1f1b")]
    assert inside("adaptive_pipe", sizes, costs)[0] <= min(fixed)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.data(), st.sampled_from((2, 3)), st.integers(1, 6), st.sampled_from(("zbh1", "zbh2")))
def test_split_backwards_are_never_slower_inside(data: st.DataObject, P: int, M: int, fixed: str) -> None:
    costs, sizes = data.draw(cell_costs(P)), {"P": P, "M": M}
    limit = {"limit": P if fixed == "zbh1" else 2 * P - 1}
    makespan, span = inside(fixed, sizes, costs)
    assert inside("zb_greedy", sizes | limit, costs)[0] <= makespan
    assert inside("zb_auto", sizes | limit, costs)[1] <= span


def test_the_example_takes_the_order_with_pairs() -> None:
    costs, sizes = load_costs(CELLS), {"P": 4, "M": 16}
    assert inside("adaptive_pipe", sizes, costs)[0] <= inside("interleaved_overlap", sizes, costs)[0] == 20_746
    by_ops = legal_schedule(open_schedule("adaptive_pipe"), sizes, replace(costs, cell=None))
    assert price_order(Dependencies.of(by_ops), costs).makespan > 23_000


def test_dispatch_takes_the_times_of_cells() -> None:
    costs = replace(load_costs(CELLS), p2p=3.0)
    pricing = analyse("interleaved_overlap", {"P": 2, "M": 4}, costs).inside
    assert pricing is not None
    kinds = {kind.kind: kind.prediction.duration for kind in pricing.kinds}
    times = op_times(legal_schedule(open_schedule("interleaved_overlap"), {"P": 2, "M": 4}, costs), costs)
    forward, backward, pair = times.alone[OpKind.F][0], times.alone[OpKind.B][3], times.pair("FB", 0, 3)
    assert [forward, backward, pair, times.p2p] == [kinds["F"], kinds["B"], kinds["FB"], 3.0]
    assert pair < forward + backward


def test_blocks_of_another_number_of_stages_are_refused() -> None:
    table = CellTable(CellCosts(), (("moe",),) * 3)
    with pytest.raises(DiagnosticError) as caught:
        legal_schedule(open_schedule("adaptive_pipe"), {"P": 2, "M": 2}, Costs(cell=table))
    assert [x.code for x in caught.value.diagnostics] == ["S404"]


def test_a_choice_that_is_not_legal_is_reported() -> None:
    costs = load_costs(CELLS)
    tree = tree_of("policy prefer B > F { repeat M { F } repeat M { B } } or { repeat M { F } repeat M-1 { B } }")
    with pytest.raises(DiagnosticError) as caught:
        legal_schedule(tree, {}, costs)
    assert {x.code[:2] for x in caught.value.diagnostics} == {"S2"}


PLAN = """plan mixed = {schedule}(P = 2, M = 4) {{
  layers 6 dense 2 pad 2 at last
  experts 64 top 8 groups 8 limit 4 shared 1 width 1408 hidden 2048
  topology nodes 2 x 2 rail 50 GB/s node 400 GB/s
  tokens 4096 dtype bf16
  alltoall hierarchical
  recompute chunk 0 full in bubbles
}}
"""


@pytest.mark.slow
def test_a_plan_is_judged_with_its_layout_method_and_recomputation(tmp_path: Path) -> None:
    costs, makespan = load_costs(CELLS), {}
    for name in ("adaptive_pipe", "interleaved_overlap", "interleaved_1f1b"):
        file = tmp_path / f"{name}.sched"
        file.write_text("sched 1\n" + PLAN.format(schedule=name))
        analysis = analyse(file, {}, costs)
        assert analysis.inside is not None
        makespan[name] = analysis.inside.late_wait.makespan
    assert makespan["adaptive_pipe"] <= min(makespan.values())


def test_a_frozen_order_notes_its_cost_file(tmp_path: Path) -> None:
    file = tmp_path / "adaptive_pipe.sched"
    file.write_text(open_schedule("adaptive_pipe").source.text)
    sizes = ["-D", "P=2", "-D", "M=4"]
    result = CliRunner().invoke(main, ["freeze", str(file), *sizes, "--cost-file", str(CELLS)])
    assert result.exit_code == 0, result.output
    note = f"# costs {sha256(CELLS.read_bytes()).hexdigest()} cells.toml"
    assert Path(result.output.strip()).read_text().splitlines()[1] == note
    told = CliRunner().invoke(main, ["check", str(file), *sizes]).output
    assert "chosen at F = 1, I = 1, W = 1; the cells of cells.toml\n" in told
    frozen = legal_schedule(open_schedule(file), {"P": 2, "M": 4})
    assert orders(frozen) == orders(legal_schedule(open_schedule("adaptive_pipe"), {"P": 2, "M": 4}, load_costs(CELLS)))


def test_a_sweep_orders_by_cells_too() -> None:
    costs = load_costs(CELLS)
    tree = open_schedule("adaptive_pipe")
    result = sweep(tree, [{"P": 2, "M": 4, "v": 2}], costs, processes=1, pricer=order_pricer(costs))
    assert (result.tried, result.failed) == (1, 0)
    by_cells, by_ops = (elaborate(tree, {"P": 4, "M": 16}, costs, pricer) for pricer in (order_pricer(costs), None))
    assert not np.array_equal(by_cells.pair, by_ops.pair)
