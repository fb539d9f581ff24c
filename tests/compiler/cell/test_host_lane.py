"""The copy of sizes to the host: its place in graphs, the hidden part, and other ranks, which never see the copy."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from schedc.cell import CellCosts, Lane, Node, SegmentTimes, StageShape, cell_program, stage_shape
from schedc.cell.collectives import verify_collectives
from schedc.cell.group import GroupTasks, task_times
from schedc.cell.host_lane import without_host
from schedc.cell.issue_order import CellOnRank, ExpertRanks, events
from schedc.cell.predict import Prediction, predict
from schedc.cell.serial import serial
from schedc.cell.table import CellTable, read_table, write_table
from schedc.cell.tasks import tasks_of
from schedc.cell.verify import verify_cell
from schedc.cli import main
from schedc.compiler import analyse, compile
from schedc.ir.program import Instruction
from schedc.plan.price_cells import stage_graphs
from schedc.step.costs.costs import Costs
from support.cell_cases import REFERENCE, shapes_of
from support.lone_cells import play_alone
from support.plan_cases import written

TIMES = (0.1, 12.0)
"""Round trips to the host, in milliseconds, the unit of `REFERENCE`."""


def costs_of(ratio: float, trip: float = 0.0, permute: float = 0.0) -> CellCosts:
    """Exchanges of a layer take ``ratio`` of its compute, 140. trip: the copy to the host; 0: none."""
    exchange = ratio * 140 / 4
    sizes = {"sizes.host": trip} if trip else {}
    return CellCosts.of(
        {**REFERENCE, "permute": SegmentTimes(permute)}, {"dispatch.node": exchange, "combine.node": exchange, **sizes}
    )


def cell(kind: str, layers: int, costs: CellCosts, method: str = "flat") -> Prediction:
    """A cell on stages of MoE layers, with the copies that the costs give a time."""
    sizes = any(name == "sizes.host" for name, _ in costs.exchanges)
    shape = stage_shape(["moe"] * layers, method, nodes=1, sizes=sizes)
    halves = shapes_of(kind, shape, shape)
    program = cell_program(kind, *halves, costs)
    assert verify_cell(program, *halves) == []
    return predict(program, *halves, costs)


# Graphs.


@pytest.mark.parametrize("method", ["flat", "hierarchical"])
def test_a_copy_is_between_the_plan_of_the_rows_and_the_rows(method: str) -> None:
    shape, plain = (stage_shape(["dense", "moe", "moe"], method, sizes=sizes) for sizes in (True, False))
    more = {"0.plan", "0.sizes.host", "1.plan", "1.sizes.host"}
    assert {*shape.names} - {*plain.names} == more
    at = shape.names.index
    assert shape.nodes[at("1.sizes.host")].after == (at("1.plan"),)
    assert shape.nodes[at("1.permute")].after == (at("1.attention"), at("1.plan"), at("1.sizes.host"))
    assert shape.queues[at("1.sizes.host")] == "host"
    assert {shape.names[node] for node in shape.backward} == {plain.names[node] for node in plain.backward}
    tasks = tasks_of("FB", shape, shape)
    bare = without_host(tasks, (1.0,) * len(tasks))
    assert bare is not None
    assert bare.tasks == tasks_of("FB", plain, plain)
    assert sum(bare.duration) == len(tasks) - 2  # the time of a plan stays, that of a copy goes
    assert sorted(index for members in bare.members for index in members) == list(range(len(tasks)))


def test_a_copy_of_another_form_is_searched_as_any_exchange() -> None:
    shape = StageShape(
        (
            Node("0.attention", Lane.COMPUTE, (), inputs=True),
            Node("0.sizes.host", Lane.HOST, (0,)),  # with a gradient
            Node("0.experts", Lane.COMPUTE, (1,)),
        ),
        (2,),
    )
    tasks = tasks_of("F", shape, None)
    assert without_host(tasks, (1.0,) * 3) is None
    costs = CellCosts.of({"attention": SegmentTimes(1), "experts": SegmentTimes(2)}, {"sizes.host": 4})
    found = predict(cell_program("F", shape, None, costs), shape, None, costs)
    assert (found.duration, found.lanes[2].exposed, found.bound) == (7, 4, "chain")


# What an order hides.


@pytest.mark.parametrize("trip", TIMES)
def test_a_pair_hides_a_round_trip_that_a_forward_pays(trip: float) -> None:
    plain = cell("F", 4, costs_of(0.5))
    asked = cell("F", 4, costs_of(0.5, trip))
    assert asked.duration == pytest.approx(plain.duration + 4 * trip)
    assert asked.lanes[2].exposed == pytest.approx(4 * trip)
    pair = cell("FB", 2, costs_of(0.5, trip))
    assert pair.duration == pytest.approx(cell("FB", 2, costs_of(0.5)).duration)
    assert pair.lanes[2].busy == pytest.approx(2 * trip)
    assert pair.exposed == 0


@pytest.mark.slow
@pytest.mark.parametrize("trip", TIMES)
def test_a_pair_of_four_layers_is_never_longer_than_with_waits_at_once(trip: float) -> None:
    assert cell("FB", 4, costs_of(0.5, trip)).duration == pytest.approx(560)
    blocking = cell("FB", 4, costs_of(0.85, permute=trip)).duration
    assert cell("FB", 4, costs_of(0.85, trip)).duration <= blocking + 1e-9
    for method, ratio in (("hierarchical", 0.85), ("flat", 1.2)):
        blocking = cell("FB", 2, costs_of(ratio, permute=trip), method).duration
        assert cell("FB", 2, costs_of(ratio, trip), method).duration <= blocking + 1e-9


# Who takes part.


def test_collectives_leave_copies_out() -> None:
    program = compile("dualpipev", P=2, M=4)
    group, costs = ExpertRanks(1, 2), costs_of(0.5, 4.0)

    def issued(sizes: bool, alike: bool = True) -> list[str]:
        shape = stage_shape(["moe"], nodes=1, sizes=sizes)

        def cell_of(rank: int, expert: int, item: Instruction) -> CellOnRank:
            halves = shapes_of(item.kind_name, shape, shape)
            if not alike and expert:
                return CellOnRank(*halves, serial(item.kind_name, *halves))
            return CellOnRank(*halves, cell_program(item.kind_name, *halves, costs))

        codes = {finding.code for finding in verify_collectives(program, group, cell_of)}
        assert codes <= (set() if alike else {"S321", "S322"})
        return sorted(event.collective.label for event in events(program, 0, 1, group, cell_of))

    assert issued(sizes=True) == issued(sizes=False) == issued(sizes=True, alike=False)
    assert not any("sizes" in label for label in issued(sizes=True))


def test_ranks_in_step_do_not_wait_for_each_others_copies() -> None:
    shape = stage_shape(["moe"], nodes=1, shared=False, sizes=True)
    costs = costs_of(0.5, 4.0)
    program = cell_program("F", shape, None, costs)
    tasks = GroupTasks.of(program, shape, None, costs, ExpertRanks(1, 2))
    copy = next(index for index, task in enumerate(tasks.tasks.all) if task.lane is Lane.HOST)
    assert tasks.members[copy] == ()
    times = task_times(tasks, np.ones((1, 1, 2)), np.ones((1, 1, 2)))
    times[copy] = np.array([[4.0, 9.0]])
    played = play_alone(tasks, times, np.zeros((3, 2)))
    assert played.carried[2].tolist() == played.exposed[2].tolist() == [4.0, 9.0]
    assert played.waiting[2].tolist() == [0.0, 0.0]
    assert played.waiting[1].tolist() == [5.0, 0.0]  # the dispatch waits for the rank whose host is slow


# Costs, reports, drawings.

TABLE = """schema = "schedc.costs/1"
[cell]
stages = "moe*2"
attention = {F = 20, I = 20, W = 18}
plan = {F = 1}
experts = {F = 20, I = 20, W = 26}
dispatch = {node = 12}
combine = {node = 12}
"""


def test_a_table_gives_the_copy_a_time() -> None:
    table, problems = read_table({"plan": {"F": 1}, "sizes": {"host": 2}, "dispatch": {"node": 3}})
    assert problems == []
    assert "0.sizes.host" in table.shapes(1)[0].names
    assert "0.sizes.host" not in table.without_exchange("sizes").shapes(1)[0].names
    assert "sizes = {host = 2.0}" in write_table(table)
    wrong = read_table({"sizes": {"rail": 2}, "dispatch": {"host": 1}})[1]
    assert [(code, message) for code, message, _, _ in wrong] == [
        ("S401", "`sizes` has no `rail`"), ("S401", "`dispatch` has no `host`"),
    ]  # fmt: skip


@pytest.mark.parametrize(("line", "asks"), [("", True), ("capacity 1.25", False), ("sizes bounded 2", False)])
def test_a_plan_that_knows_its_sizes_asks_for_none(tmp_path, line: str, asks: bool) -> None:  # type: ignore[no-untyped-def]
    lines = f"layers 4\n  experts 8 top 2 width 16 hidden 8\n  tokens 8\n  {line}"
    schedule = analyse(written(tmp_path, lines), {}).schedule
    table = read_table({"sizes": {"host": 2}, "dispatch": {"node": 3}})[0]
    shapes, _ = stage_graphs(schedule, Costs(cell=CellTable(table.costs, (("moe", "moe"),))))
    assert ("0.sizes.host" in shapes[0].names) == asks


def told(*arguments: str) -> str:
    run = CliRunner().invoke(main, [*arguments])
    assert run.exit_code == 0, run.output
    return run.stdout


def test_reports_and_drawings_have_the_lane_where_it_is_used(tmp_path) -> None:  # type: ignore[no-untyped-def]
    lanes, texts = [], []
    for number, line in enumerate(("", "sizes = {host = 2}\n")):
        path = tmp_path / f"{number}.toml"
        path.write_text(TABLE + line)
        options = ("1f1b", "-D", "P=2", "-D", "M=4", "--cost-file", str(path))
        facts = json.loads(told("check", *options, "--json"))["cells"]
        lanes.append([list(kind["lanes"]) for kind in facts["kinds"]] + [list(facts["lanes"])])
        texts.append(told("show", *options, "--cell", "F"))
    assert all(named == ["rail", "node"] for named in lanes[0])
    assert all(named == ["rail", "node", "host"] for named in lanes[1])
    assert facts["lanes"]["host"] == {"busy": 2 * 2 * 2 * 4, "exposed": 2 * 2 * 2 * 4}  # ranks, layers, time, F's
    assert ">host<" not in texts[0]
    assert ">host<" in texts[1]
