"""A microbatch in slices: its graph, the order of its gradients, and how much of its communication is hidden."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedc.cell import CellCosts, SegmentTimes, cell_program, stage_shape
from schedc.cell.costs import SliceFactor
from schedc.cell.graph import StageShape
from schedc.cell.host_lane import without_host
from schedc.cell.predict import predict
from schedc.cell.program import HALVES, Half
from schedc.cell.serial import serial
from schedc.cell.slices import sliced
from schedc.cell.tasks import tasks_of
from schedc.cell.verify import verify_cell
from schedc.cli import main
from schedc.step.costs.costs import dump_costs, load_costs

ROOT = Path(__file__).resolve().parents[3]
CELLS = ROOT / "examples/costs/cells.toml"


def test_every_node_appears_once_per_slice_behind_its_own_slice_and_joint_nodes_once() -> None:
    shape = stage_shape(["moe", "moe"], balance=True)
    twice = sliced(shape, 2)
    assert len(twice) == 2 * (len(shape) - 2) + 2
    names = {name: index for index, name in enumerate(twice.names)}
    assert twice.nodes[names["0.experts.s1"]].after == (names["0.permute.s1"], names["0.dispatch.rail.s1"])
    assert twice.nodes[names["0.balance.rail"]].after == (names["0.attention.s0"], names["0.attention.s1"])
    for number in (0, 1):
        assert names["0.balance.rail"] in twice.nodes[names[f"1.attention.s{number}"]].after
    assert twice.outputs == (names["1.post.s0"], names["1.post.s1"])
    assert {node.role for node in twice.nodes} == {node.role for node in shape.nodes}
    assert sliced(shape, 1) is shape


@pytest.mark.parametrize("kind", ["F", "I", "B", "W", "FB", "FI", "FW", "IW"])
def test_cells_in_slices_are_legal_and_add_gradients_in_the_order_of_slices(kind: str) -> None:
    costs = replace(_typical(), slices=(SliceFactor(3, 1.1),))
    shape = sliced(stage_shape(["dense", "moe"], "hierarchical", balance=True), 3)
    forward, backward = (shape if halves else None for halves in HALVES[kind])
    for program in (serial(kind, forward, backward), cell_program(kind, forward, backward, costs)):
        assert not verify_cell(program, forward, backward)
        for half in (Half.BACKWARD, Half.WEIGHT):
            ran = [shape.nodes[step.node] for step in program.steps if step.half is half and step.action == "run"]
            for role in {node.whole for node in ran}:
                assert [node.slice for node in ran if node.whole == role] in ([0, 1, 2], [0])


def test_a_gradient_of_a_later_slice_that_comes_first_is_refused() -> None:
    shape = sliced(stage_shape(["dense"]), 2)
    program = serial("B", None, shape)
    swapped = (program.steps[1], program.steps[0], *program.steps[2:])
    assert verify_cell(replace(program, steps=swapped), None, shape)[0].code == "S320"


def test_a_slice_takes_its_share_of_the_time_and_of_what_slices_cost_more() -> None:
    costs = CellCosts.of({"experts": SegmentTimes(10, 20, 30)}, {"dispatch.rail": 8.0})
    costs = replace(costs, slices=(SliceFactor(2, 1.1), SliceFactor(4, 1.2, 1.5)))
    for count, segment, exchange in ((1, 10, 8.0), (2, 5.5, 4.0), (3, 11 / 3, 8 / 3), (4, 3.0, 3.0)):
        shape = sliced(stage_shape(["moe"]), count)
        role = {node.role: index for index, node in enumerate(shape.nodes)}
        assert costs.times(shape, role["experts"]).forward == pytest.approx(segment)
        assert costs.times(shape, role["dispatch"]).forward == pytest.approx(exchange)


def test_copies_of_sizes_of_each_slice_leave_a_cell_and_come_back() -> None:
    shape = sliced(stage_shape(["moe"], sizes=True), 2)
    tasks = tasks_of("FB", shape, shape)
    costs = CellCosts.of(dict(_typical().segments), {**dict(_typical().exchanges), "sizes.host": 1.0})
    bare = without_host(tasks, tasks.durations(costs, costs))
    assert bare is not None
    assert len(bare.tasks) == len(tasks) - 4  # in each slice a plan and a copy are merged with the segment behind
    assert not verify_cell(cell_program("FB", shape, shape, costs), shape, shape)


def test_cells_of_one_op_hide_their_exchanges_behind_the_other_slice() -> None:
    table = load_costs(CELLS).cell
    assert table is not None
    (whole,) = table.shapes(1)
    hidden = {}
    for count in (1, 2):
        shape = sliced(whole, count)
        for kind, graphs in {"F": (shape, None), "I": (None, shape)}.items():
            program = cell_program(kind, *graphs, table.costs)
            hidden[kind, count] = predict(program, *graphs, table.costs).hidden
    assert hidden["F", 1] < 0.2
    assert hidden["I", 1] < 0.2
    assert min(hidden["F", 2], hidden["I", 2]) > 0.97


@pytest.mark.parametrize(
    ("schedule", "rail", "least", "most"),
    [("1f1b", 20, 0.97, 0.54), ("zbh1", 20, 0.97, 0.16), ("dualpipev", 29.75, 0.94, 0.78)],
)
def test_check_hides_nearly_all_communication_of_a_step(
    schedule: str, rail: float, least: float, most: float, tmp_path: Path
) -> None:
    file = tmp_path / "cells.toml"
    file.write_text(CELLS.read_text().replace("rail = 20", f"rail = {rail}"))
    command = ["check", schedule, "-D", "P=4", "-D", "M=16", "--cost-file", str(file), "--json"]
    whole, slices = (json.loads(CliRunner().invoke(main, [*command, *more]).stdout) for more in ((), ("--slices", "2")))
    assert whole["cells"]["hidden_step"] <= most
    assert slices["cells"]["hidden_step"] >= least
    assert slices["slices"] == [2] * slices["stages"]
    assert slices["cells"]["kinds"][0]["communication"] == whole["cells"]["kinds"][0]["communication"]


def test_factors_of_slices_are_read_and_written(tmp_path: Path) -> None:
    file = tmp_path / "costs.toml"
    file.write_text("schema = 'schedc.costs/1'\n[cell]\nexperts = {F = 2}\nslices = {4 = [1.2, 1.1], 2 = 1.05}\n")
    costs = load_costs(file)
    assert costs.cell is not None
    assert costs.cell.costs.slices == (SliceFactor(2, 1.05), SliceFactor(4, 1.2, 1.1))
    file.write_text(dump_costs(costs))
    assert load_costs(file) == costs


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("slices = 1.05", "`slices` is 1.05"),
        ("slices = {1 = 1.05}", "`slices` has a factor for `1`"),
        ("slices = {2 = 0}", "`2` of `slices` is 0"),
        ("slices = {2 = [1, 2, 3]}", r"`2` of `slices` is \[1, 2, 3\]"),
    ],
)
def test_factors_that_mean_nothing_are_refused(row: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.toml"
    file.write_text(f"schema = 'schedc.costs/1'\n[cell]\nexperts = {{F = 2}}\n{row}\n")
    with pytest.raises(Exception, match=message):
        load_costs(file)


def _typical() -> CellCosts:
    segments = {name: SegmentTimes(4, 4, 4) for name in ("dense", "attention", "shared", "experts")}
    exchanges = {f"{name}.{lane}": 3.0 for name in ("dispatch", "combine") for lane in ("rail", "node")}
    return CellCosts.of(segments, {**exchanges, "balance.rail": 0.5})


def test_shapes_of_slices_are_equal_and_hashed_alike() -> None:
    one, two = (sliced(StageShape(shape.nodes, shape.outputs), 2) for shape in (stage_shape(["moe"]),) * 2)
    assert one == two
    assert hash(one) == hash(two)
