"""Parts of a model inside cells: nodes, and serial stages, which take the times of the table of parts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc import compiler
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.program import Half, PlanOrder
from schedc.cell.schedule import cell_program
from schedc.cell.standard_blocks import BESIDE_LAYERS, stage_shape
from schedc.cell.table import CellTable, parse_blocks, read_table, write_blocks, write_table
from schedc.cell.tasks import tasks_of
from schedc.cell.verify import verify_cell
from schedc.cli import main
from schedc.compiler import Analysis, analyse
from schedc.inputs import open_input
from schedc.plan.layout.parser import parse_layout
from schedc.plan.price_cells import stage_graphs, with_layout
from schedc.plan.recomputed_nodes import graphs_of
from schedc.source import Source
from schedc.step.costs.costs import Costs, load_costs, parse_costs
from schedc.step.costs.parts import PartCost, PartCosts
from schedc.step.timeline import simulate
from support.needs import needs
from support.paths import ROOT
from support.plan_cases import written
from support.sweeps import halved, swept

pytestmark = pytest.mark.slow

TABLES = """schema = "schedc.costs/1"
[ops]
p2p = 0.0625
[parts]
embedding = {F = 0.25, W = 0.5}
dense = {F = 1, I = 1.125, W = 0.875}
moe = {F = 1.5, I = 1.75, W = 1.125}
mtp = {F = 2.25, I = 2.5, W = 1.75}
head = {F = 0.875, I = 0.75, W = 0.5}
op = {F = 0.015625, I = 0.03125, W = 0.0625}

[cell]
embedding = {F = 0.25, W = 0.5}
dense = {F = 1, I = 1.125, W = 0.875}
attention = {F = 0.5, I = 0.5, W = 0.375}
experts = {F = 0.375, I = 0.5, W = 0.5}
shared = {F = 0.125, I = 0.125, W = 0.25}
post = {F = 0.0625, I = 0.0625}
routing = {node = [0.0625, 0]}
dispatch = {node = [0.125, 0.25]}
combine = {node = [0.25, 0.3125]}
mtp = {F = 0.75, I = 0.75, W = 0.625}
head = {F = 0.875, I = 0.75, W = 0.5}
op = {F = 0.015625, I = 0.03125, W = 0.0625}
"""
"""Times of parts, and times of nodes whose sums they are."""

ORDERS = (
    "1f1b(P = 4, M = 8)",
    "zbh1(P = 4, M = 8)",
    "zbh1_overlap(P = 4, M = 8)",
    "dualpipev(P = 2, M = 8)",
    "interleaved_overlap(P = 2, M = 8, v = 2)",
    "chimera(P = 4, M = 4)",
)
LAYERS = 'layout "Et*3|tt|tm|mL" dense 2'
_ROLES = ("op", "embedding", "dense", "attention", "experts", "mtp", "head")
BLOCK = "block hidden 1024 heads 8 inner 2048  tokens 1024"
SIZED = f"experts 8 top 2 width 512 hidden 1024  {BLOCK}"


def read(text: str = TABLES) -> Costs:
    return parse_costs(Source("c.toml", text))


def analysed(folder: Path, lines: str, head: str, text: str = TABLES) -> Analysis:
    return analyse(written(folder, lines, head), {}, read(text))


def atomic(result: Analysis) -> float:
    assert result.inside is not None
    return result.inside.serial.makespan


@pytest.mark.sweep
@pytest.mark.parametrize("head", halved(ORDERS))
def test_a_step_of_serial_cells_takes_what_the_parts_say(tmp_path: Path, head: str) -> None:
    for lines in (LAYERS, 'layout "Et|t|t|tL" dense 4', 'layout "E|noop,t*3|t*2|tL" dense 0'):
        result = analysed(tmp_path, lines, head)
        assert atomic(result) == pytest.approx(result.timeline.makespan, rel=1e-12), lines
        assert result.inside is not None
        assert result.inside.late_wait.makespan <= atomic(result)


@given(numbers=st.lists(st.floats(0, 8), min_size=21, max_size=21), hierarchical=st.booleans())
@settings(max_examples=swept(300, 10), deadline=None)
def test_any_times_that_add_up_give_one_step(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], hierarchical: bool
) -> None:
    F, I, W = (dict(zip(_ROLES, numbers[at::3], strict=True)) for at in range(3))  # noqa: E741
    segments = {role: SegmentTimes(F[role], I[role], W[role]) for role in _ROLES}
    lanes = ("rail", "node") if hierarchical else ("node",)
    exchanges = {f"{way}.{lane}": 0.375 for way in ("dispatch", "combine") for lane in lanes}
    moved = 0.75 * len(lanes)
    block = np.array(segments["attention"]) + segments["experts"] + (moved, moved, 0.0)
    parts = {name: PartCost(*segments[name]) for name in ("op", "embedding", "dense", "head")}
    parts |= {"moe": PartCost(*block), "mtp": PartCost(*(block + segments["mtp"]))}
    table = CellTable(CellCosts.of(segments, exchanges), method="hierarchical" if hierarchical else "flat")
    plan = open_input(written(tmp_path_factory.mktemp("plans"), LAYERS, "zbh1(P = 4, M = 8)"))
    result = compiler.price(plan, {}, Costs(parts=PartCosts(**parts), cell=table))
    shapes, costs = stage_graphs(result.schedule, result.costs)
    given = result.costs.resolved(4)
    for kind in ("F", "I", "W", "B"):
        graphs = [(shape, None) if kind == "F" else (None, shape) for shape in shapes]
        sums = [sum(tasks_of(kind, *both).durations(costs, costs)) for both in graphs]
        assert np.allclose(sums, getattr(given, kind), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", ORDERS[:3])
def test_an_r_takes_its_nodes_in_both(tmp_path: Path, head: str) -> None:
    result = analysed(tmp_path, f"{LAYERS}  {SIZED}  recompute full in bubbles", head)
    assert result.inside is not None
    times = {kind.stages[0]: kind.serial for kind in result.inside.kinds if kind.kind == "R"}
    assert times
    for stage, time in times.items():
        assert result.costs.resolved(4).R[stage] == pytest.approx(time, rel=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("level", halved(["medium", "full", "layer"]))
def test_backwards_recompute_nodes_inside_and_shares_outside(tmp_path: Path, level: str) -> None:
    """The two steps differ by that alone: with the times of the nodes the step of ops is that of serial cells."""
    result = analysed(tmp_path, f"{LAYERS}  {SIZED}  recompute {level}", ORDERS[1])
    shapes, costs = stage_graphs(result.schedule, result.costs)
    again = [
        sum(costs.duration(shape, Half.RECOMPUTE, node) for node in shape.recomputed)
        + sum(costs.times(shape, index).forward * node.inside for index, node in enumerate(shape.nodes))
        for shape in shapes
    ]
    given = result.costs.resolved(4)
    nodes = Costs(F=tuple(given.F), I=tuple(given.I), W=tuple(given.W), p2p=0.0625, recompute_in_backward=tuple(again))
    step = simulate(result.schedule, nodes).makespan
    assert min(again) > 0
    assert atomic(result) == pytest.approx(step, rel=1e-12)
    assert atomic(result) != pytest.approx(result.timeline.makespan, rel=1e-3)


@pytest.mark.parametrize("head", ORDERS[:4])
@pytest.mark.parametrize("level", ["act", "full", "layer", "layer in bubbles"])
def test_dense_layers_recompute_alike_inside_and_outside(tmp_path: Path, head: str, level: str) -> None:
    lines = f'layout "Et*3|tt|tt|tL" dense 8  {BLOCK}  recompute {level}'
    result = analysed(tmp_path, lines, head)
    assert result.costs.resolved(4).recompute_in_backward.any() == (level != "act")
    assert atomic(result) == pytest.approx(result.timeline.makespan, rel=1e-12)


@pytest.mark.parametrize(
    "head", ["1f1b(P = 4, M = 8)", "zbh1(P = 4, M = 8)", "interleaved_overlap(P = 2, M = 8, v = 2)"]
)
@pytest.mark.parametrize("form", ["early", "again"])
def test_products_of_a_loss_in_chunks_move_in_both(tmp_path: Path, head: str, form: str) -> None:
    whole, chunks = (analysed(tmp_path, f"{LAYERS}  loss {each}", head) for each in ("whole", form))
    assert atomic(chunks) == pytest.approx(chunks.timeline.makespan, rel=1e-12)
    assert whole.inside is not None
    assert chunks.inside is not None
    times, others = ({(of.kind, of.stages): of.serial for of in each.inside.kinds} for each in (chunks, whole))
    moved = [stages for (kind, stages), time in times.items() if time != others[kind, stages]]
    assert moved
    assert all(3 in stages for stages in moved)


def test_whole_backwards_beside_split_ones_make_logits_twice_in_cells(tmp_path: Path) -> None:
    """DualPipeV has both: a B in a cell is an I and a W, each of which makes the logits, in 0.875."""
    result = analysed(tmp_path, f"{LAYERS}  loss again", "dualpipev(P = 2, M = 8)")
    assert result.inside is not None
    inside = next(kind.serial for kind in result.inside.kinds if kind.kind == "B" and kind.stages == (3, 3))
    assert inside == pytest.approx(result.costs.resolved(4).B[3] + 0.875, rel=1e-12)


def test_the_example_says_one_thing_twice() -> None:
    costs = load_costs(ROOT / "examples" / "costs" / "parts.toml")
    result = analyse(ROOT / "examples" / "04_plan" / "parts.sched", {}, costs)
    assert atomic(result) == pytest.approx(result.timeline.makespan, rel=1e-12)


def test_nodes_stand_where_their_parts_do() -> None:
    layout = parse_layout(Source("layout", "Et*3|tt|tm|mL"), dense=2)
    table = with_layout(read().cell or CellTable(CellCosts()), layout)
    assert [write_blocks(row) for row in table.blocks] == [
        "op embedding dense*2 moe", "op moe*2", "op moe*2 mtp", "op moe mtp head"]  # fmt: skip
    names = [node.name for node in table.shapes(4)[3].nodes]
    assert (names[0], names[1], names[-3:]) == ("op", "0.attention", ["0.post", "mtp.0", "head"])
    head = table.shapes(4)[3].nodes[-1]
    assert (head.weights, head.inputs, head.layer, table.shapes(4)[3].outputs) == (True, False, -1, (len(names) - 1,))
    dense = with_layout(table, parse_layout(Source("layout", "Et|t|m|L"), dense=2))
    assert [write_blocks(row) for row in dense.blocks] == ["op embedding dense", "op dense", "op dense mtp", "op head"]


def test_without_their_times_graphs_have_no_such_nodes() -> None:
    layout = parse_layout(Source("layout", "Et*3|tt|tm|mL"), dense=2)
    costs = CellCosts.of({"attention": SegmentTimes(1), "shared": SegmentTimes(1)})
    table = with_layout(CellTable(costs), layout)
    assert table.blocks == (("dense", "dense", "moe"), ("moe",) * 2, ("moe",) * 2, ("moe",))
    assert table.shapes(4)[1] == stage_shape(["moe", "moe"], nodes=1)
    only = with_layout(CellTable(CellCosts.of({"head": SegmentTimes(1)})), layout)
    assert only.blocks == (*table.blocks[:3], ("moe", "head"))


@pytest.mark.parametrize("text", ["op embedding dense*3 moe", "moe*2 mtp head", "moe mtp moe mtp head", "op", "head"])
def test_texts_of_blocks(text: str) -> None:
    blocks = parse_blocks(text)
    assert blocks is not None
    assert write_blocks(blocks) == text
    assert len(set(stage_shape(blocks).names)) == len(stage_shape(blocks))


@pytest.mark.parametrize("text", ["op*2", "head moe head", "embedding embedding", "tail"])
def test_what_stands_once_in_a_stage(text: str) -> None:
    assert parse_blocks(text) is None
    _, ((code, _, key, help),) = read_table({"stages": text})
    assert (code, key) == ("S402", "stages")
    assert "op, embedding and head stand once" in help


def test_a_part_has_no_time_by_layer() -> None:
    _, ((code, _, _, help),) = read_table({"2.head": {"F": 1}})
    assert code == "S401"
    assert all(role in help for role in BESIDE_LAYERS)


def test_tables_with_parts_read_back_equal() -> None:
    table = read().cell
    assert table is not None
    table = table.with_blocks([("op", "embedding", "moe"), ("op", "moe", "moe", "mtp", "head")])
    text = "\n".join(['schema = "schedc.costs/1"', *write_table(table)])
    assert read(text).cell == table


AGAIN = {"attention": 0.03125, "experts": 0.125, "dense": 0.25}


@pytest.mark.parametrize(("level", "moe", "dense"), [("norm", 1, 0), ("act", 5, 8), ("light", 5, 8)])
def test_backwards_repeat_element_wise_work(tmp_path: Path, level: str, moe: int, dense: int) -> None:
    """Units of 1/32: norms repeat below `layer`, activations below the level that multiplies again.

    The table reads back equal. Many costs side by side take the same times.
    """
    text = TABLES
    for role, time in AGAIN.items():
        text = re.sub(rf"(?m)^{role} = (.*[^}}]), W = ([0-9.]+)}}$", rf"{role} = \1, W = \2, again = {time}}}", text)
    text = text.replace(", again = 0.25}", "}", 1)  # [parts] has no such key
    costs = read(text)
    assert costs.cell is not None
    assert read("\n".join(['schema = "schedc.costs/1"', *write_table(costs.cell)])).cell == costs.cell
    lines = f'layout "Et*3|tt|tt|tL" dense 3  {SIZED}  recompute'
    plain, again = (
        analyse(written(tmp_path, f"{lines} {of}", "1f1b(P = 4, M = 8)"), {}, costs) for of in ("none", level)
    )
    assert again.inside is not None
    assert plain.inside is not None
    before, after = ({of.stages: of.serial for of in each.inside.kinds if of.kind == "B"} for each in (plain, again))
    more = {stages: after[stages] - before[stages] for stages in before}
    assert more == {(0, 0): 3 * dense / 32, (1, 1): 2 * moe / 32, (3, 3): moe / 32}
    plan = again.schedule.plan
    shapes = graphs_of(with_layout(costs.cell, again.layout).shapes(4), plan)[0]
    for shape in shapes:
        tasks = tasks_of("B", None, shape)
        many = CellCostBatch.of([costs.cell.costs] * 2).durations(tasks)
        assert many[:, 1].tolist() == list(tasks.durations(costs.cell.costs, costs.cell.costs))


def test_blocks_of_a_table_name_parts_without_a_plan() -> None:
    stages = 'stages = ["op embedding moe", "op moe", "op moe", "op moe head"]'
    text = TABLES.replace("[cell]", f"[cell]\n{stages}").replace("[parts]", "[ignored]")
    cell = text[text.index("[cell]") :]
    result = analyse("1f1b", {"P": 4, "M": 8}, read(f'schema = "schedc.costs/1"\n{cell}'))
    known = result.inside
    assert known is not None
    by_stage = {kind.stages[0]: kind.serial for kind in known.kinds if kind.kind == "F"}
    assert by_stage == {0: 1.5 + 0.25 + 0.015625, 1: 1.5 + 0.015625, 3: 1.5 + 0.875 + 0.015625}


@pytest.mark.parametrize("kind", ["F", "B", "FB", "FI", "FW"])
def test_programs_with_parts_are_legal_and_orders_by_hand_pass_them_over(kind: str) -> None:
    table = read().cell
    assert table is not None
    shape = stage_shape(parse_blocks("op embedding moe*2 mtp head") or (), nodes=1)
    plain = stage_shape(["moe", "moe"], nodes=1)
    order = PlanOrder(("B.experts.I", "F.attention", "F.experts"), ("B.combine", "F.dispatch"))
    for graph in (shape, plain):
        for by_hand in (None, order) if kind in ("FB", "FI") else (None,):
            program = cell_program(kind, graph, graph, table.costs, by_hand)
            assert verify_cell(program, graph, graph) == []
            if by_hand is not None:
                named = [
                    (step.half, graph.nodes[step.node].layer)
                    for step in program.steps
                    if graph.nodes[step.node].role == "experts" and step.half is not Half.WEIGHT
                ]
                pairs = [(Half.BACKWARD, 1), (Half.FORWARD, 0), (Half.BACKWARD, 0), (Half.FORWARD, 1)]
                assert named == pairs


def test_slices_cut_parts_too(tmp_path: Path) -> None:
    plain = analysed(tmp_path, LAYERS, ORDERS[0])
    sliced = analysed(tmp_path, f"{LAYERS}  slices 2", ORDERS[0])
    assert atomic(sliced) == pytest.approx(atomic(plain), rel=1e-12)
    names = {node.name for shape in stage_graphs(sliced.schedule, sliced.costs)[0] for node in shape.nodes}
    assert {"op.s0", "embedding.s1", "mtp.0.s1", "head.s0"} <= names


@needs("dot")
def test_cells_with_parts_are_drawn(tmp_path: Path) -> None:
    path, plan = tmp_path / "c.toml", written(tmp_path, LAYERS, ORDERS[3])
    path.write_text(TABLES, encoding="utf-8")
    for option in ("--cell", "FB"), ("--graph", "cells"):
        line = ["show", plan, "--cost-file", str(path), "--cell-stages", "3", *option, "-o", str(tmp_path / "x.svg")]
        if option[0] == "--cell":
            line[line.index("3")] = "0,3"
        result = CliRunner().invoke(main, line)
        assert result.exit_code == 0, result.output
        picture = (tmp_path / "x.svg").read_text(encoding="utf-8")
        assert "head" in picture
        assert "mtp" in picture
