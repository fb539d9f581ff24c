"""Cells in a whole schedule: what it takes from inside, and the tables of times that say so."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from schedc.cell import (
    Action,
    CellCosts,
    Half,
    SegmentTimes,
    stage_shape,
)
from schedc.cell.table import CellTable, parse_blocks, read_table, write_blocks, write_table
from schedc.cell.verify import verify_cell
from schedc.cli import main
from schedc.compiler import analyse
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.load.library import Text
from schedc.plan.passes import Step, lower
from schedc.source import Source
from schedc.step.cells.cell_pricing import price
from schedc.step.costs.costs import Costs, dump_costs, parse_costs
from schedc.step.dependencies import Dependencies
from schedc.step.messages import simulate_messages
from schedc.step.timeline import durations, simulate
from support.cell_cases import REFERENCE, reference_costs

# The whole schedule.


def test_a_schedule_whose_outputs_leave_at_the_end_has_the_plain_timeline() -> None:
    known = Dependencies.of(analyse("dualpipev", {"P": 4, "M": 12}).schedule)
    costs = Costs(F=1.0, I=1.5, W=0.75, p2p=0.25)
    spent = durations(known, costs.resolved(8))
    plain = simulate(known.schedule, costs, known)
    delay = np.broadcast_to(spent[:, None, None], (len(known), 3, 3))
    inside = simulate_messages(known, np.arange(len(known)), spent, delay, 0.25).timeline
    assert np.array_equal(plain.start, inside.start)
    assert np.array_equal(plain.end, inside.end)
    assert np.array_equal(plain.bound_by, inside.bound_by)


@pytest.mark.parametrize("name", ["dualpipev", "zbv", "1f1b"])
def test_a_schedule_priced_from_inside_beside_atomic_cells(name: str) -> None:
    known = Dependencies.of(analyse(name, {"P": 4, "M": 16}).schedule)
    shape = stage_shape(["moe"] * 2)
    inside = price(known, [shape] * known.schedule.stages, reference_costs(12), p2p=3.0)
    assert inside.late_wait.makespan <= inside.overlapped.makespan < inside.serial.makespan
    assert sum(kind.count for kind in inside.kinds) == len(known)
    # Every exchange of every microbatch, stage and direction is in one cell: 2 layers, 2 forward and 2 backward.
    communication, exposed = inside.communication()
    assert communication == known.schedule.stages * 16 * 2 * 4 * 12
    assert sum(busy for busy, _ in inside.lanes.values()) == communication
    assert inside.hidden_step == 1 - exposed / communication
    pairs = bool(known.pairs.any())
    assert (inside.hidden_steady is not None) == pairs
    if pairs:
        assert inside.late_wait.makespan < inside.overlapped.makespan
        assert inside.hidden_steady == 1.0 > inside.hidden_step
    serial = np.array([kind.serial for kind in inside.kinds])[inside.kind]
    assert inside.serial.busy.sum() == serial.sum()


def test_stages_of_other_blocks_have_cells_of_their_own() -> None:
    known = Dependencies.of(analyse("dualpipev", {"P": 2, "M": 8}).schedule)
    table = CellTable(reference_costs(12), (("dense", "moe"), ("moe", "moe"), ("moe", "moe"), ("moe",)))
    inside = price(known, table.shapes(4), table.costs)
    pairs = {kind.stages for kind in inside.kinds if kind.kind == "FB"}
    assert len(pairs) > 1
    assert all(first + second == 3 for first, second in pairs)


# Cost files.

FILE = """\
schema = "schedc.costs/1"

[cell]
stages = ["dense*3 moe", "moe*2"]
method = "hierarchical"
attention = {F = 20, I = 20, W = 18}
"1.experts" = {F = 9, I = 9, W = 9}
dispatch = {rail = [12, 14], node = 3}
"""


def test_a_cell_table_is_read_and_written() -> None:
    costs = parse_costs(Source("c.toml", FILE))
    assert costs.cell is not None
    assert costs.cell.blocks == (("dense", "dense", "dense", "moe"), ("moe", "moe"))
    assert costs.cell.method == "hierarchical"
    shape = costs.cell.shapes(2)[1]
    at = shape.names.index
    assert costs.cell.costs.duration(shape, Half.BACKWARD, at("0.dispatch.rail")) == 14
    assert costs.cell.costs.duration(shape, Half.WEIGHT, at("1.experts")) == 9
    assert costs.cell.costs.duration(shape, Half.FORWARD, at("0.experts")) == 0
    assert parse_costs(Source("again.toml", dump_costs(costs))) == costs


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("attenton = {F = 1}", "S401", "`attenton` is no part of a cell"),
        ("attention = 3", "S402", "`attention` is not a table of times"),
        ("attention = {F = -1}", "S402", "`F` of `attention` is -1"),
        ("attention = {F = [1, 2]}", "S402", "`F` of `attention` is [1, 2]"),
        ("attention = {rail = 1}", "S401", "`attention` has no `rail`"),
        ("dispatch = {rail = [1, 2, 3]}", "S402", "`rail` of `dispatch`"),
        ("dispatch = {rail = true}", "S402", "`rail` of `dispatch`"),
        ('stages = "moe*99999999"', "S402", "`stages` is"),
        ('stages = ["moe", 3]', "S402", "`stages` is"),
        ('method = "quick"', "S402", "`method` is 'quick'"),
        ("dense = {F = 1}\ngather = {node = 1}", "S402", "`dense` beside exchanges of tensor"),
        ("gather = {host = 1}", "S401", "`gather` has no `host`"),
        ("gather = {rail = 1, node = 2}", "S402", "`gather` has times on both links"),
    ],
)
def test_mistakes_in_a_cell_table_are_found_at_their_lines(line: str, code: str, says: str) -> None:
    text = f'schema = "schedc.costs/1"\n\n[cell]\n{line}\n'
    with pytest.raises(DiagnosticError) as caught:
        parse_costs(Source("c.toml", text))
    (found,) = caught.value.diagnostics
    assert found.position == (code, 4, 1)
    assert says in found.message


SPLIT = 'schema = "schedc.costs/1"\n\n[cell]\nafter_gather = {F = 20, I = 20, W = 20}\ngather = {node = [5, 6]}\n'


def test_a_time_of_gather_cuts_dense_layers_at_their_cores() -> None:
    costs = parse_costs(Source("c.toml", SPLIT + 'stages = "dense embedding"\nkeys = {rail = 3}\nenter = {node = 1}\n'))
    assert costs.cell is not None
    (shape,) = costs.cell.shapes(1)
    cores = ["before_gather", "gather.node", "before_keys", "keys.rail", "before_scatter", "scatter.node"]
    second = ["before_gather", "gather.node", "after_gather", "scatter.node"]
    names = [f"{core}.{name}" for core, own in enumerate((cores, second)) for name in own]
    assert list(shape.names) == [*names, "1.post", "embedding", "2.enter.node"]
    gather = shape.names.index("1.gather.node")
    assert [costs.cell.costs.duration(shape, half, gather) for half in (Half.FORWARD, Half.BACKWARD)] == [5, 6]
    assert parse_costs(Source("again.toml", dump_costs(costs))) == costs


def test_keys_between_nodes_leave_rows_of_experts_inside_them() -> None:
    costs = parse_costs(Source("c.toml", SPLIT + 'stages = "moe"\nkeys = {rail = 3}\ndispatch = {node = 2}\n'))
    assert costs.cell is not None
    assert {"0.keys.rail", "0.routing.node", "0.dispatch.node"} <= set(costs.cell.shapes(1)[0].names)


@pytest.mark.parametrize(
    ("lines", "times", "says"),
    [
        ("parallel dp 2", "", "`gather` a time, and the plan has tp 1"),
        ("parallel tp 2", "keys = {node = 1}\n", "`keys` a time, and the plan has cp 1"),
        ("parallel tp 2  recompute act", "", "no time of level `act`"),
        ("parallel tp 2  recompute stage 0 layer 1", "", "no time of levels of single layers"),
    ],
)
def test_exchanges_that_a_plan_does_not_have_are_refused(lines: str, times: str, says: str) -> None:
    plan = open_input(Text(Source("p.sched", f"sched 1\nplan p = 1f1b(P = 2, M = 2) {{ layers 2  {lines} }}\n")))
    with pytest.raises(DiagnosticError) as caught:
        lower(Step(plan, {}, parse_costs(Source("c.toml", SPLIT + times))), "inside")
    (found,) = caught.value.diagnostics
    assert found.code == "S402"
    assert says in found.message


@given(st.lists(st.sampled_from(["dense", "moe"]), max_size=12))
def test_blocks_are_written_and_read(blocks: list[str]) -> None:
    assert parse_blocks(write_blocks(blocks)) == tuple(blocks)


@given(
    st.dictionaries(st.sampled_from(["attention", "experts", "0.shared"]), st.tuples(*[st.floats(0, 1e9)] * 3)),
    st.dictionaries(st.sampled_from(["dispatch", "combine", "1.routing"]), st.tuples(*[st.floats(0, 1e9)] * 2)),
)
def test_tables_are_written_and_read(
    segments: dict[str, tuple[float, float, float]], exchanges: dict[str, tuple[float, float]]
) -> None:
    costs = CellCosts.of(
        {name: SegmentTimes(*times) for name, times in segments.items()},
        {f"{name}.rail": SegmentTimes(*times) for name, times in exchanges.items()},
    )
    text = "\n".join(['schema = "schedc.costs/1"', *write_table(CellTable(costs, (("moe", "moe"),)))])
    assert parse_costs(Source("c.toml", text)).cell == CellTable(costs, (("moe", "moe"),))
    assert read_table({})[0] == CellTable(CellCosts())


def test_check_tells_what_is_hidden(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "cells.toml"
    path.write_text(
        'schema = "schedc.costs/1"\n[cell]\nstages = "moe*2"\nattention = {F = 20, I = 20, W = 18}\n'
        "experts = {F = 20, I = 20, W = 26}\ndispatch = {rail = 12}\ncombine = {rail = 12}\n"
    )
    run = CliRunner().invoke(main, ["check", "dualpipev", "-D", "P=2", "-D", "M=8", "--cost-file", str(path), "--json"])
    facts = json.loads(run.stdout)["cells"]
    assert facts["hidden_steady"] == 1.0 > facts["hidden_step"] == 1 - facts["exposed"] / facts["communication"]
    spans, idle = facts["makespan"], facts["idle"]
    assert spans["floor"] <= spans["inside"] <= spans["early"] <= spans["overlapped"] < spans["atomic"]
    assert idle["overlapped"] - idle["inside"] == pytest.approx(spans["overlapped"] - spans["inside"])
    assert sum(facts["shares"].values()) == pytest.approx(1)
    assert facts["lanes"]["rail"]["busy"] == facts["communication"]
    assert {kind["kind"] for kind in facts["kinds"]} >= {"F", "FB", "I"}
    run = CliRunner().invoke(main, ["check", "dualpipev", "-D", "P=2", "-D", "M=8", "--cost-file", str(path)])
    assert f"hidden {facts['hidden_step']:.4f} of the step, 1.0000 in overlapped pairs" in run.stdout
    path.write_text('schema = "schedc.costs/1"\n[cell]\nstages = ["moe", "dense"]\n')
    run = CliRunner().invoke(main, ["check", "dualpipev", "-D", "P=2", "-D", "M=8", "--cost-file", str(path)])
    assert run.exit_code == 1
    assert "S404" in run.stderr
    assert "cells.toml:3:1" in run.stderr


PLAN = """\
sched 1
plan small = dualpipev(P = 2, M = 8) {
  layers 8 dense 3
  experts 16 top 4 shared 1
  topology nodes 4 x 2 rail 50 GB/s node 400 GB/s
  alltoall hierarchical
  overlap auto
  cell F & B { compute B.post F.attention B.mlp.I B.mlp.W F.mlp B.attention.I  comm B.combine F.dispatch }
}
"""


def test_a_plan_says_what_the_stages_are_made_of_and_how_rows_travel(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "small.sched"
    path.write_text(PLAN)
    costs = CellCosts.of({**REFERENCE, "dense": SegmentTimes(7, 7, 7)}, {"dispatch.rail": 12, "dispatch.node": 3})
    inside = analyse(path, {}, Costs(cell=CellTable(costs))).inside
    assert inside is not None
    # Ett|tt|tt|ttL: three dense layers, then five MoE layers. An output of W has no time of its own.
    microbatches, moe, dense = 8, 5, 3
    work = moe * sum(sum(times) for times in REFERENCE.values()) + dense * 21
    computed = sum(kind.count * kind.prediction.compute for kind in inside.kinds)
    assert computed == microbatches * work
    busy = {lane: busy for lane, (busy, _) in inside.lanes.items()}
    assert busy == {"rail": microbatches * moe * 2 * 12, "node": microbatches * moe * 2 * 3}
    pair = next(kind for kind in inside.kinds if kind.kind == "FB" and kind.stages == (3, 0))
    back = stage_shape(["dense", "dense"])
    forward = stage_shape(["moe", "moe"], "hierarchical")
    starts = [forward.names[step.node] for step in pair.program.steps if step.action is Action.START]
    assert verify_cell(pair.program, forward, back) == []
    assert starts.index("0.dispatch.rail") < starts.index("0.dispatch.node") < starts.index("1.dispatch.rail")


def test_a_cost_file_with_a_time_of_the_balance_has_the_exchange() -> None:
    table, wrong = read_table({"attention": {"F": 2.0}, "balance": {"node": 0.5}})
    assert wrong == []
    (shape,) = table.shapes(1)
    at = shape.names.index("0.balance.node")
    assert table.costs.duration(shape, Half.FORWARD, at) == 0.5
    assert "balance = {node = 0.5}" in write_table(table)
