"""Copies of experts even the recorded rows of a step, take their time in its cells, and are reported."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from compiler.plan.test_link_rows import row_by_row
from schedc.cell.issue_order import scope
from schedc.cli import main
from schedc.ir.arrays import Int64
from schedc.ir.plan import Balance, ExpertSizes, Plan
from schedc.plan.counts.copied_experts import copies_facts
from schedc.plan.counts.copy_times import copy_time
from schedc.plan.counts.layers import moe_layer
from schedc.plan.price_cells import standard_table
from schedc.step.costs.forest import NUMPY, forest_of, rows_on_ranks
from schedc.step.costs.step_copies import Held, QuotaTables, divided, plan_step, quotas_of
from support.copied_plans import CELLS, EXPERTS, LAYERS, LINES, MICROBATCHES, RANKS, analysed, routed

PER_ROW = 6 / (64 * 2 * 3 / 4)
"""Time of a row on the link: a dispatch of 6 sends three quarters of 128 rows."""
COPY = 3 * 16 * PER_ROW
"""Three matrices of 16 columns are 48 rows. Their gradients in float32 are twice as many."""


def computed(rows: Int64, within: str = "1.01", slots: int | None = None) -> tuple[Int64, Int64, Int64]:
    """(rows of ranks, copies that a rank holds, copies that it sends), [layers, microbatches, ranks] each."""
    homes = rows[-1].sum(axis=2).reshape(LAYERS, MICROBATCHES, RANKS, -1)
    on_ranks = rows_on_ranks(NUMPY, homes, forest_of(homes, Fraction(within), slots))
    away = on_ranks * ~np.eye(RANKS, dtype=bool)[..., None] > 0
    return on_ranks.sum((3, 4)), away.sum((3, 4)), away.sum((2, 4))


@pytest.mark.parametrize("slots", [None, 1])
def test_facts_are_those_of_the_closed_form(tmp_path: Path, slots: int | None) -> None:
    """Both experts of the first rank are wanted most: with one slot a rank takes rows of one expert."""
    rows = routed()
    rows[..., :2] += 60
    load, held, sent = computed(rows, slots=slots)
    assert held.max() == (slots or 2)
    step = analysed(tmp_path, rows, "  balance by microbatch" + ("" if slots is None else f" slots {slots}"))
    assert step.costs.cell is not None
    assert step.costs.cell.rows is not None
    facts = copies_facts(step.plan, step.costs.cell.costs, step.costs.cell.rows)
    most = load.max(axis=2) / load.mean()
    assert facts["after"] == {"mean": pytest.approx(most.mean()), "worst": pytest.approx(most.max())}
    assert facts["fullest"]["worst"] > 1.3
    assert (facts["after"]["worst"] < 1.05) == (slots is None)
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


@pytest.mark.parametrize(("method", "expected"), [("flat", False), ("hierarchical", True)])
@pytest.mark.parametrize("named", ["", "distinct = {rail = 0.5}\n"])
def test_ranks_tell_distinct_tokens_behind_copies_of_two_hops(
    tmp_path: Path, method: str, expected: bool, named: str
) -> None:
    """As in the runtime, whether the cost file names the exchange or not; without copies nobody does."""
    lines = LINES.replace("1 x 4 node 400 GB/s", "2 x 2 node 400 GB/s rail 50 GB/s").replace("flat", method)
    cells = CELLS.replace("node = 6", "rail = 9, node = 6") + named
    for line, told in (("  balance by step", expected), ("", False)):
        inside = analysed(tmp_path, routed(), line, "1f1b", cells, lines).inside
        assert inside is not None
        graphs = [kind.forward or kind.backward for kind in inside.kinds]
        assert all(graph is not None and ("0.distinct.rail" in graph.names) == told for graph in graphs)


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
    """Experts take the rows behind the plan, links what leaves a rank or comes, and the busiest home its copies."""
    rows = routed(1)
    homes = rows[-1].sum(axis=2).reshape(LAYERS, MICROBATCHES, RANKS, -1)
    forest = forest_of(homes, Fraction("1.05"))
    load, held, sent = computed(rows, "1.05")
    balanced = analysed(tmp_path, rows, "  balance by microbatch within 1.05", schedule).inside
    uneven = analysed(tmp_path, rows, "", schedule).inside
    assert balanced is not None
    assert balanced.group is not None
    assert uneven is not None
    assert uneven.group is not None
    even = balanced.group.compute.sum(axis=0) / (load.sum(axis=(0, 1)) + LAYERS * MICROBATCHES * 128)
    assert even == pytest.approx(np.full(RANKS, 60 / 128))
    copies = np.maximum(held, sent).max(axis=2).sum()
    on_ranks = rows_on_ranks(NUMPY, homes, forest)
    at_home = rows_on_ranks(NUMPY, homes, forest_of(homes, Fraction(99)))
    for group, placed, more in ((balanced.group, on_ranks, 3 * COPY * copies), (uneven.group, at_home, 0)):
        carried = (
            4
            * PER_ROW
            * sum(travelled(row_by_row(rows[-1][place], placed[place])) for place in np.ndindex(LAYERS, MICROBATCHES))
        )
        assert group.carried.sum(axis=(0, 1)) == pytest.approx(np.full(RANKS, carried + more))
    assert balanced.late_wait.makespan < uneven.late_wait.makespan


def travelled(between: Int64) -> int:
    """The most rows that any rank sends to others, or gets."""
    away = between * (1 - np.eye(RANKS, dtype=np.int64))
    return int(max(away.sum(0).max(), away.sum(1).max()))


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


def test_an_imbalance_of_several_nodes_may_stay(tmp_path: Path) -> None:
    lines, cells = LINES.replace("nodes 1 x 4", "nodes 2 x 2"), f"{CELLS}[cell.rows]\nimbalance = 1.4\n"
    for line, most in (("  balance by microbatch", 1.4), ("  balance by microbatch over group", 1.01)):
        step = analysed(tmp_path, None, line, cells=cells, lines=lines)
        assert step.inside is not None
        assert step.inside.group is not None
        assert step.inside.group.rows.max() == pytest.approx(most, abs=1e-6)


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


def uneven_before(layer: int = 0) -> Int64:
    """Two steps: an uneven layer, then even ones. Copies lie where the first step asks, and rows need none."""
    rows = np.full((2, LAYERS, MICROBATCHES, RANKS, EXPERTS), 16)
    rows[0, layer, :, :, 0] += 12
    rows[0, layer, :, :, 7] -= 12
    return rows


def copies_of(step: Int64) -> Held:
    """What ranks borrow after a step of rows [microbatches, ranks, experts of a rank]."""
    squares = np.square(step.sum(2)).sum(0)
    return plan_step(step.sum(0).ravel().tolist(), squares.tolist(), len(step), 2)


def quotas(held: Held) -> QuotaTables:
    parent, below, borrowed, peers = quotas_of(held, 2)
    return QuotaTables(np.array(parent), np.array(below), np.array(borrowed), peers)


def test_copies_for_a_step_follow_the_step_before(tmp_path: Path) -> None:
    rows = np.concatenate([routed(3), routed(3, 0.9)])
    homes = rows.sum(axis=3).reshape(2, LAYERS, MICROBATCHES, RANKS, -1)
    held = [copies_of(step) for step in homes[0]]
    load = [
        rows_on_ranks(NUMPY, now, divided(NUMPY, now, quotas(each))[0]).sum((2, 3))
        for now, each in zip(homes[1], held, strict=True)
    ]
    step = analysed(tmp_path, rows, "  balance by step")
    assert step.costs.cell is not None
    assert step.costs.cell.rows is not None
    facts = copies_facts(step.plan, step.costs.cell.costs, step.costs.cell.rows)
    most = np.array(load).max(axis=2) / 128
    assert facts["after"] == {"mean": pytest.approx(most.mean()), "worst": pytest.approx(most.max())}
    assert facts["rows"] == np.array(load).max() < homes[1].sum(axis=3).max()
    assert facts["held"] == np.mean([len(experts) for each in held for experts in each]) > 0
    owners = [np.bincount([e // 2 for experts in each for e in experts], minlength=RANKS).max() for each in held]
    assert facts["sent"] == np.mean(owners)
    assert facts["bytes"] == facts["sent"] * 3 * 16 * 32 * (2 + 4)  # weights in bf16, sums in float32
    assert (facts["per"], facts["foreseen"], facts["unpriced"]) == ("step", True, None)


@pytest.mark.parametrize("node", [6, 60])
@pytest.mark.parametrize(("layer", "ends"), [(0, True), (2, False)])
def test_weights_travel_with_the_step_and_gradients_behind_the_last_w(
    tmp_path: Path, node: int, layer: int, ends: bool
) -> None:
    """In the first stage weights come with the first F, whose attention of 20 hides them, and gradients end the step.

    In the last stage weights come before their F, and gradients leave while the first stage still works.
    """
    cells = CELLS.replace("node = 6", f"node = {node}")
    rows = uneven_before(layer)
    balanced = analysed(tmp_path, rows, "  balance by step", "1f1b", cells).inside
    plain = analysed(tmp_path, rows[1:], "", "1f1b", cells).inside
    assert balanced is not None
    assert balanced.group is not None
    assert plain is not None
    assert plain.group is not None
    held = copies_of(rows[0, layer].sum(axis=1).reshape(MICROBATCHES, RANKS, -1))
    owners = np.bincount([expert // 2 for experts in held for expert in experts])
    weights = max(*map(len, held), *owners) * COPY * node / 6
    gradients = 2 * weights  # float32 beside bf16
    more = (balanced.group.carried - plain.group.carried).sum(axis=0)
    changed = np.flatnonzero((np.abs(more) > 1e-9).any(axis=1))
    dependencies = balanced.late_wait.dependencies
    stage, last = layer // 2, MICROBATCHES - 1
    assert [str(dependencies.schedule.op(int(dependencies.first[cell]))) for cell in changed] == [
        f"{stage}F0", f"{stage}B{last}"
    ]  # fmt: skip
    assert more[changed] == pytest.approx(np.array([[weights] * RANKS, [gradients] * RANKS]))
    longer = max(0, weights - 20) + gradients if ends else 0
    assert balanced.late_wait.makespan - plain.late_wait.makespan == pytest.approx(longer)
    assert balanced.serial.makespan - plain.serial.makespan >= longer - 1e-9


def test_copies_for_a_step_stay_inside_nodes(tmp_path: Path) -> None:
    """Rows of each node are divided in it, and its ranks wait for no other node's copies."""
    rows = uneven_before(0)  # the first rank has too many, the last one too few: each node evens its own two
    lines = LINES.replace("1 x 4 node 400 GB/s", "2 x 2 node 400 GB/s rail 50 GB/s")
    cells = CELLS.replace("dispatch = {node = 6}", "dispatch = {rail = 6, node = 6}").replace("{node", "{rail")
    step = analysed(tmp_path, rows, "  balance by step", "1f1b", cells, lines)
    assert step.costs.cell is not None
    assert step.costs.cell.rows is not None
    assert step.inside is not None
    assert step.inside.ranks is not None
    copies = step.inside.ranks.for_step
    assert copies is not None
    assert copies.members == ((0, 1), (2, 3))
    assert copies.weights == (COPY, 0, 0, 0)
    facts = copies_facts(step.plan, step.costs.cell.costs, step.costs.cell.rows)
    assert (facts["held"], facts["unpriced"]) == (2 / (LAYERS * RANKS), None)


def test_weights_of_a_later_layer_leave_when_the_one_before_has_its_own(tmp_path: Path) -> None:
    """Both layers of the first stage have copies: those of the second travel beside the experts of the first."""
    rows = uneven_before(0)
    rows[0, 1] = rows[0, 0]
    cells = CELLS.replace("node = 6", "node = 60")
    balanced = analysed(tmp_path, rows, "  balance by step", "1f1b", cells).inside
    plain = analysed(tmp_path, rows[1:], "", "1f1b", cells).inside
    assert balanced is not None
    assert plain is not None
    held = copies_of(rows[0, 0].sum(axis=1).reshape(MICROBATCHES, RANKS, -1))
    owners = np.bincount([expert // 2 for experts in held for expert in experts])
    weights = max(*map(len, held), *owners) * COPY * 10
    # The second ones stand in the queue before the combine of the first layer, which begins 20 later without them.
    longer = weights - 20 + max(0, weights - 20) + 2 * 2 * weights
    assert balanced.late_wait.makespan - plain.late_wait.makespan == pytest.approx(longer)


@pytest.mark.parametrize("number", [1, 2])
def test_hot_experts_for_a_step_are_broadcast_one_after_the_other(tmp_path: Path, number: int) -> None:
    """Experts 0 and 4 are wanted, and their rows stay on the ranks of their tokens, without a link."""
    rows = uneven_before(0)
    rows[0, 0, :, :, 4] += 12 * (number - 1)
    rows[0, 0, :, :, 3] -= 12 * (number - 1)
    cells = CELLS.replace("node = 6", "node = 60")
    hot = analysed(tmp_path, rows, f"  hot {number}", "1f1b", cells).inside
    stay = rows[1:].copy()
    own = np.arange(RANKS)
    stay[0, 0, :, own, 2 * own + 1] += stay[0, 0, :, own, 0] + (number - 1) * stay[0, 0, :, own, 4]
    stay[0, 0, :, :, [0, 4][:number]] = 0
    plain = analysed(tmp_path, stay, "", "1f1b", cells).inside
    assert hot is not None
    assert plain is not None
    weights = number * COPY * 10
    longer = weights - 20 + 2 * weights
    assert hot.late_wait.makespan - plain.late_wait.makespan == pytest.approx(longer)


@pytest.mark.parametrize("line", ["", "  hot 2", "  balance by step"])
def test_cells_have_no_exchange_of_copies_that_travel_otherwise(tmp_path: Path, line: str) -> None:
    """A time of `hot` in the table is of copies by microbatch."""
    rows = routed()
    given, plain = (
        analysed(tmp_path, rows, line, cells=cells).timeline.makespan
        for cells in (f"{CELLS}hot = {{node = 6}}\n", CELLS)
    )
    assert given == plain


def test_the_graph_of_a_plan_has_its_exchanges_of_copies(tmp_path: Path) -> None:
    lines = LINES.replace("nodes 1 x 4", "nodes 2 x 2").replace("flat", "hierarchical")
    schedule = analysed(tmp_path, None, "  balance by microbatch", lines=lines).schedule
    assert {"0.hot.node", "0.distinct.rail"} <= set(standard_table(schedule).shapes(1)[0].names)


def test_copies_of_a_step_double_bounded_buffers_of_experts_alone(tmp_path: Path) -> None:
    experts = ExpertSizes(8, 2, 1, 1, 0, 16, 32)
    plain, doubled = (
        moe_layer(Plan(dtype="bf16", bound=1.25, balance=balance), experts) for balance in (None, Balance(by="step"))
    )
    assert doubled.rows == plain.rows._replace(experts=2 * plain.rows.experts)
    assert doubled.flops == plain.flops
    assert doubled.held() > plain.held()


def test_hot_experts_without_sizes_are_said_to_lack_them(tmp_path: Path) -> None:
    lines = LINES.replace(" width 16 hidden 32", "")
    step = analysed(tmp_path, routed(), "  hot 2", lines=lines)
    assert step.costs.cell is not None
    assert step.costs.cell.rows is not None
    facts = copies_facts(step.plan, step.costs.cell.costs, step.costs.cell.rows)
    assert "needs the sizes of `experts`" in facts["unpriced"]


@pytest.mark.slow
@pytest.mark.parametrize("table", [None, "imbalance = 1.4", "per_rank = [1.6, 0.4, 1.0, 1.0]"])
def test_fixed_sizes_take_as_long_for_any_rows(tmp_path: Path, table: str | None) -> None:
    """With a capacity ranks compute padding, too. Bounded exchanges send whole blocks, and ranks compute their rows."""
    rows = routed() if table is None else None
    uneven = CELLS if table is None else f"{CELLS}[cell.rows]\n{table}\n"
    even = np.full((1, LAYERS, MICROBATCHES, RANKS, EXPERTS), 16)
    carried, makespans = {}, {}
    for line in ("", "  sizes bounded 2", "  capacity 1.25 drop probs"):
        found = analysed(tmp_path, rows, line, cells=uneven).inside, analysed(tmp_path, even, line).inside
        groups = [inside.group for inside in found if inside is not None and inside.group is not None]
        carried[line], plain = (group.carried.sum(axis=(0, 1)).max() for group in groups)
        makespans[line] = groups[0].timeline.makespan / groups[1].timeline.makespan
        assert carried[line] == pytest.approx(plain) or not line
    exact, bounded, padded = makespans.values()
    assert exact > bounded > padded == pytest.approx(1)
    assert carried[""] > 1.1 * carried["  sizes bounded 2"]
