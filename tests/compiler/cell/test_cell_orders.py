"""The graphs of stages, and the order inside a cell: by list scheduling, and by hand."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from schedc.cell import (
    Action,
    CellCosts,
    Half,
    Lane,
    Node,
    PlanOrder,
    SegmentTimes,
    StageShape,
    cell_program,
    stage_shape,
)
from schedc.cell.local_search import improved
from schedc.cell.predict import predict
from schedc.cell.schedule import forget_programs
from schedc.cell.tasks import tasks_of
from schedc.cell.verify import verify_cell
from schedc.diagnostics import CompilerBug, DiagnosticError
from schedc.source import Source, Span
from support.cell_cases import REFERENCE, predicted, reference_costs, reference_shape

# Graphs.


def test_the_standard_blocks_have_the_segments_that_cutting_at_exchanges_gives() -> None:
    shape = stage_shape(["dense", "moe", "moe"], "hierarchical")
    assert shape.names == (
        "0.dense",
        *(f"0.{name}" for name in (
            "attention", "shared", "routing.rail", "permute", "dispatch.rail", "relay", "dispatch.node", "experts",
            "combine.node", "relay_back", "combine.rail",
        )),
        *(f"1.{name}" for name in (
            "attention", "shared", "routing.rail", "permute", "dispatch.rail", "relay", "dispatch.node", "experts",
            "combine.node", "relay_back", "combine.rail", "post",
        )),
    )  # fmt: skip
    by_name = dict(zip(shape.names, shape.nodes, strict=True))
    assert [node.name for node in shape.nodes if node.inputs] == ["0.dense"]
    assert {shape.names[at] for at in by_name["1.attention"].after} == {
        "0.attention", "0.shared", "0.permute", "0.combine.rail",
    }  # fmt: skip
    assert shape.outputs == (len(shape) - 1,)
    assert not by_name["0.routing.rail"].differentiable
    assert {shape.names[at] for at in shape.weights} == {
        "0.dense", "0.attention", "0.shared", "0.experts", "1.attention", "1.shared", "1.experts",
    }  # fmt: skip
    assert by_name["0.experts"].lane is Lane.COMPUTE
    assert by_name["0.dispatch.node"].lane is Lane.NODE


@pytest.mark.parametrize(
    ("blocks", "options", "present", "absent"),
    [
        (["moe"], {"nodes": 1}, "0.dispatch.node", "0.relay"),
        (["moe"], {"shared": False}, "0.post", "0.shared"),
        (["moe", "dense"], {}, "0.post", "1.dense"),
        ([], {}, None, "0.post"),
    ],
)
def test_what_a_stage_is_made_of(blocks: list[str], options: dict[str, object], present: str, absent: str) -> None:
    names = stage_shape(blocks, **options).names  # type: ignore[arg-type]
    assert present in names or present is None
    assert absent not in names


def test_a_graph_that_is_none_is_our_fault() -> None:
    with pytest.raises(CompilerBug, match="not all before it"):
        StageShape((Node("0.a", Lane.COMPUTE, (0,)),), (0,))
    with pytest.raises(CompilerBug, match="no cell of kind BF"):
        tasks_of("BF", stage_shape(["moe"]), None)


def test_shapes_and_costs_are_sent_to_other_processes_without_their_hashes() -> None:
    for value in (stage_shape(["moe"]), reference_costs(5)):
        hash(value)
        again = pickle.loads(pickle.dumps(value))
        assert again == value
        assert "_hash" not in vars(again)


# Orders: list scheduling.

SIMULATED = {5: 1.0, 12: 1.0, 20: 1.0, 30: 1.0, 36: 0.962, 48: 0.724}
"""Communication hidden in a pair of four layers by another list scheduler, by the time of one exchange."""


@pytest.mark.parametrize(("exchange", "hidden"), SIMULATED.items())
def test_a_pair_hides_what_list_scheduling_is_known_to_hide(exchange: float, hidden: float) -> None:
    found = predicted("FB", reference_shape(), reference_costs(exchange))
    assert found.compute == 560
    assert found.communication == 16 * exchange
    assert round(found.hidden, 3) >= hidden
    assert found.bound == ("compute" if hidden == 1 else "rail")


FOUR, THREE, TWO = ("moe",) * 4, ("dense", "moe", "moe"), ("moe",) * 2
BEST = [
    (FOUR, FOUR, (15.25, 4, 0), 1.0),
    (FOUR, FOUR, (20, 5.2, 0), 1.0),
    (FOUR, FOUR, (21, 4.2, 0), 0.9975),
    (FOUR, FOUR, (25, 5, 0), 0.9895),
    (TWO, THREE, (25, 5, 1), 0.9793),
    (TWO, THREE, (28, 5, 1), 0.9548),
]
"""Share of communication that the best order hides in a pair of stages, as an exact solver has proved.

The times are those of an exchange between nodes and inside a node, and of the routing. The ratio to compute is 0.55 to
0.86.
"""
NEAR = [(FOUR, FOUR, (25, 5, 1), 0.975)]
"""Pairs of which no proof is known; a solver has found 0.983."""


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "backward", "times", "hidden"), BEST + NEAR)
def test_exchanges_of_two_hops_hide_what_can_be_hidden(
    forward: tuple[str, ...], backward: tuple[str, ...], times: tuple[float, float, float], hidden: float
) -> None:
    rail, node, routing = times
    names = ("dispatch", "combine")
    costs = CellCosts.of(
        {**REFERENCE, "dense": SegmentTimes(30, 30, 30)},
        {f"{x}.rail": rail for x in names}
        | {f"{x}.node": node for x in names}
        | {"routing.rail": SegmentTimes(routing)},
    )
    first, second = (stage_shape(blocks, "hierarchical") for blocks in (forward, backward))
    found = predict(cell_program("FB", first, second, costs), first, second, costs)
    assert found.hidden >= hidden


def test_a_first_and_a_last_stage_of_unequal_blocks_hide_all() -> None:
    """A pair whose best order has nothing exposed, found only by moving counts and rows of both halves together."""
    costs = CellCosts.of(REFERENCE, {"routing.rail": SegmentTimes(1.0), "dispatch.rail": 29.5, "combine.rail": 29.5})
    first, last = stage_shape(["dense", "moe", "moe"]), stage_shape(["moe", "moe", "dense"])
    found = predict(cell_program("FB", first, last, costs), first, last, costs)
    assert found.hidden == 1.0


def test_counts_queue_behind_rows_only_where_they_share_a_communicator() -> None:
    for method, queue in (("flat", "rail"), ("hierarchical", "counts")):
        shape = stage_shape(["moe"], method)
        assert shape.queues[shape.names.index("0.routing.rail")] == queue
        assert shape.queues[shape.names.index("0.dispatch.rail")] == "rail"


def test_the_balance_queues_behind_no_rows_and_is_waited_for_at_the_end_of_its_layer() -> None:
    for method in ("flat", "hierarchical"):
        shape = stage_shape(["moe", "moe"], method, balance=True)
        told = shape.names.index("0.balance.rail")
        assert shape.queues[told] == "counts"
        assert shape.nodes[told].after == (shape.names.index("0.attention"),)
        assert shape.consumers[told] == (shape.names.index("1.attention"),)
        assert told not in shape.backward
    costs = CellCosts.of(REFERENCE, {"balance.rail": SegmentTimes(80.0), "dispatch.rail": 5, "combine.rail": 5})
    found = cell_program("F", shape, None, costs)
    steps = [(step.action, shape.names[step.node]) for step in found.steps]
    assert steps.index((Action.START, "0.balance.rail")) < steps.index((Action.RUN, "0.permute"))
    assert steps.index((Action.WAIT, "0.balance.rail")) > steps.index((Action.RUN, "0.experts"))


@pytest.mark.parametrize(("exchange", "hidden"), [(5, 1.0), (20, 1.0), (30, 1.0), (36, 0.961), (48, 0.72)])
def test_standard_blocks_with_counts_of_their_own_hide_as_much(exchange: float, hidden: float) -> None:
    assert predicted("FB", stage_shape(["moe"] * 4), reference_costs(exchange)).hidden >= hidden


def test_one_block_alone_hides_three_of_its_four_exchanges() -> None:
    """The shared expert takes one forward and one backward exchange, weight gradients the other backward one."""
    costs = CellCosts.of(
        {"attention": SegmentTimes(10, 10, 10), "shared": SegmentTimes(12, 12, 4), "experts": SegmentTimes(10, 10, 12)},
        {"dispatch.rail": 10, "combine.rail": 10},
    )
    shape = stage_shape(["moe"])
    forward, backward = predicted("F", shape, costs), predicted("B", shape, costs)
    assert forward.exposed == pytest.approx(10)  # the combine: nothing of the block is left to do
    assert backward.exposed == 0
    assert forward.communication + backward.communication == 40
    assert predicted("I", shape, costs).exposed == pytest.approx(10)  # no weight gradients to fill it


def test_outputs_leave_as_soon_as_they_are_complete_and_not_at_the_end() -> None:
    found = predicted("FB", reference_shape(), reference_costs(12))
    assert found.activation_at is not None
    assert found.gradient_at is not None
    assert max(found.activation_at, found.gradient_at) < 0.8 * found.duration
    alone = predicted("B", reference_shape(), reference_costs(0))
    assert alone.gradient_at == alone.duration - 4 * (26 + 18)  # weight gradients come last where nothing waits


@pytest.mark.slow
def test_equal_arguments_give_equal_programs() -> None:
    shape = stage_shape(["moe"] * 2, "hierarchical")
    costs = CellCosts.of(REFERENCE, {"dispatch.rail": 31, "combine.rail": 31, "dispatch.node": 9, "combine.node": 9})
    first = cell_program("FB", shape, shape, costs)
    forget_programs()
    assert cell_program("FB", shape, shape, costs) == first


def test_recomputed_segments_run_before_their_backward_and_need_no_exchange() -> None:
    shape = stage_shape(["moe"])
    experts = shape.names.index("0.experts")
    program = cell_program("B", None, shape, reference_costs(10), recomputed=(experts,))
    order = [(step.half, step.node) for step in program.steps if step.action is Action.RUN]
    assert order.index((Half.RECOMPUTE, experts)) < order.index((Half.BACKWARD, experts))
    assert verify_cell(program, None, shape) == []
    assert (
        predict(program, None, shape, reference_costs(10)).compute == 20 + 48 + 44
    )  # F of the experts, I and W of all


# Orders by hand.

HAND = PlanOrder(
    ("B.post", "F.attention", "B.mlp.I", "B.mlp.W", "F.mlp", "B.attention.I", "F.post", "B.attention.W"),
    ("B.combine", "F.dispatch", "B.dispatch", "F.combine"),
)
"""The order of launches of a public trainer for a pair of MoE layers."""


@pytest.mark.parametrize(("exchange", "hidden"), [(5, 1.0), (20, 0.98), (30, 0.9)])
def test_an_order_by_hand_runs_as_it_is_written(exchange: float, hidden: float) -> None:
    shape, costs = reference_shape(), reference_costs(exchange)
    program = cell_program("FB", shape, shape, costs, HAND)
    assert verify_cell(program, shape, shape) == []
    found = predict(program, shape, shape, costs)
    assert found.hidden >= hidden
    assert found.duration >= predicted("FB", shape, costs).duration
    names = [(step.half, shape.names[step.node]) for step in program.steps if step.action is Action.RUN]
    first_pair = [
        (Half.BACKWARD, "3.post"), (Half.FORWARD, "0.attention"), (Half.BACKWARD, "3.experts"),
        (Half.WEIGHT, "3.experts"), (Half.FORWARD, "0.experts"), (Half.BACKWARD, "3.attention"),
    ]  # fmt: skip
    assert [name for name in names if name in first_pair] == first_pair
    lane = [(step.half, shape.names[step.node]) for step in program.steps if step.action is Action.START]
    assert lane[:4] == [
        (Half.BACKWARD, "3.combine.rail"), (Half.FORWARD, "0.dispatch.rail"), (Half.BACKWARD, "3.dispatch.rail"),
        (Half.FORWARD, "0.combine.rail"),
    ]  # fmt: skip


def test_an_order_by_hand_takes_halves_of_other_layers() -> None:
    long, short = stage_shape(["dense", "moe", "moe"], "hierarchical"), stage_shape(["moe"], "hierarchical")
    for forward, backward in ((long, short), (short, long)):
        assert verify_cell(cell_program("FB", forward, backward, reference_costs(20), HAND), forward, backward) == []


@pytest.mark.parametrize(
    ("compute", "communication", "message", "help"),
    [
        (("F.mlp", "F.attention"), (), "deadlocks", "after what it needs"),
        (("F.attenton",), (), "`F.attenton`: the lane has no such role", "did you mean `attention`?"),
        (("F.mlp", "F.experts"), (), "`F.experts` appears twice in one lane", "once"),
        (("F.mlp.W",), (), "`F.mlp.W` is no part of a cell", "B.experts.W"),
        ((), ("B.dispatch.W",), "`B.dispatch.W` is no part of a cell", "B.role.I"),
        ((), ("F.combine", "F.dispatch"), "deadlocks", "after what it needs"),
    ],
)
def test_an_order_that_cannot_run_is_refused_where_it_stands(
    compute: tuple[str, ...], communication: tuple[str, ...], message: str, help: str
) -> None:
    order = PlanOrder(compute, communication, Source("x.sched", "a\nb c"), Span(2, 3, 2, 4))
    shape = stage_shape(["moe"])
    with pytest.raises(DiagnosticError) as caught:
        cell_program("FB", shape, shape, CellCosts(), order)
    (found,) = caught.value.diagnostics
    assert found.position == ("S323", 2, 3)
    assert message in found.message
    assert help in found.help


def test_costs_that_give_a_cell_the_same_times_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of another plan name roles that this cell does not have; other times are searched anew."""
    forget_programs()
    searches = []

    def counted(*arguments: Any) -> Any:
        searches.append(arguments)
        return improved(*arguments)

    monkeypatch.setattr("schedc.cell.schedule.improved", counted)
    shape, costs = stage_shape(["moe"]), reference_costs(12)
    first = cell_program("FB", shape, shape, costs)
    others = CellCosts.of({**dict(costs.segments), "dense": SegmentTimes(4, 4, 4)}, dict(costs.exchanges))
    assert cell_program("FB", shape, shape, others) is first
    assert len(searches) == 1
    cell_program("FB", shape, shape, reference_costs(13))
    cell_program("FB", stage_shape(["moe"], shared=False), shape, costs)
    assert len(searches) == 3
    forget_programs()
