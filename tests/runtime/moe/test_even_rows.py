"""Rows of experts made even: as many on all ranks, the bits of the same pieces at home, states, and refusals."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import nn

from runtime.moe.even_cases import EXPERT, IN_PLACE, Case, Results, differing, run, scale
from runtime.moe.hot_cases import gradients, layers_of, pipeline, skewed, step
from schedc.cell.graph import Lane
from schedc.cell.issue_order import scope
from schedc.cell.standard_blocks import stage_shape
from schedc.step.costs.exchange import bounded_rows
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe import planner
from schedc_runtime.moe.counts import METHODS, Method
from schedc_runtime.moe.even_rows import EvenRows
from schedc_runtime.moe.even_slots import EvenLender
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.partition import partition
from schedc_runtime.ranks.expert_group import in_process_expert_groups
from schedc_runtime.segments.graph import stage_graph
from schedc_runtime.testing import pool
from support.segmented_cases import small_moe
from support.sweeps import in_sweeps, swept, thinned

pytestmark = pytest.mark.slow


@in_sweeps("test_a_rank_with_one_slot_takes_one_expert", "test_processes")
@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", {"P": 1, "M": 2}, "float64"),
        Case("zbh1", {"P": 1, "M": 2}, "float32"),
        Case("dualpipev", {"P": 1, "M": 2}, "bfloat16"),
    ],
    ids=str,
)
def test_bits(case: Case) -> None:
    """Loss and all gradients are those of the same pieces at home; all but those of experts are the plain run's."""
    plain, in_place, even = (run(case, way) for way in ("plain", "in place", "even"))
    assert max(max(rows) - min(rows) for rows in even.rows) <= 1
    assert sum(rows for rows, *_ in even.counted) == even.copied > 0
    assert sorted(map(sum, even.rows)) == sorted(map(sum, plain.rows))
    assert max(max(rows) - min(rows) for rows in plain.rows) > 1
    assert differing(even, in_place) == []
    others = [name for name in differing(even, plain) if not name.endswith(EXPERT)]
    assert others == []
    if case.dtype == "float64":
        for name, grad in even.gradients.items():
            torch.testing.assert_close(grad, plain.gradients[name], rtol=1e-12, atol=1e-12)


def test_a_rank_with_one_slot_takes_one_expert() -> None:
    """Rows of other experts stay at home, and are counted. No rank has more rows than its limit or than its own."""
    case = Case("zbh1", {"P": 1, "M": 2}, "float32")
    plain, in_place, even, slots = (run(case, way) for way in ("plain", "slots in place", "even", "slots"))
    limits = [-(-sum(row) // len(row)) for row in plain.rows]
    for own, row, limit in zip(plain.rows, slots.rows, limits, strict=True):
        assert all(mine <= max(before, limit) for before, mine in zip(own, row, strict=True))
    assert max(map(max, slots.rows)) < max(map(max, plain.rows))
    assert sum(each[0] for each in slots.counted) == slots.copied
    moved, left = slots.copied, sum(each[3] for each in slots.counted)
    assert moved + left == even.copied > moved > 0
    assert in_place.rows == plain.rows
    assert differing(slots, in_place) == []
    assert [name for name in differing(slots, plain) if not name.endswith(EXPERT)] == []


NODES = [
    Case("zbh1", {"P": 1, "M": 2}, "float64", nodes=2, ranks=8),
    Case("1f1b", {"P": 1, "M": 2}, "bfloat16", nodes=2, ranks=8, method="hierarchical"),
]


def fullest(results: Results, peers: int) -> float:
    """The most rows of a rank over the mean of its node, in the mean over layers and microbatches."""
    parts = [row[first : first + peers] for row in results.rows for first in range(0, len(row), peers)]
    return sum(max(part) * peers / sum(part) for part in parts) / len(parts)


@in_sweeps("test_a_rank_with_one_slot_takes_one_expert", "test_processes")
@pytest.mark.sweep
@pytest.mark.parametrize(("way", "case"), swept([*product(("even", "step"), NODES)], [("even", NODES[1])]))
def test_rows_stay_in_their_node(way: str, case: Case) -> None:
    """All ranks of a node have as many rows, and nodes have what they had. Bits are those of copies over all ranks."""
    plain, in_place, even = (run(case, each) for each in ("plain", IN_PLACE[way], way))
    for before, after in zip(plain.rows, even.rows, strict=True):
        assert [sum(after[first : first + 4]) for first in (0, 4)] == [
            sum(before[first : first + 4]) for first in (0, 4)
        ]
        if way == "even":
            assert all(max(part) - min(part) <= 1 for part in (after[:4], after[4:]))
    assert fullest(even, 4) - 1 < 0.4 * (fullest(plain, 4) - 1)
    assert differing(even, in_place) == []
    assert [name for name in differing(even, plain) if not name.endswith(EXPERT)] == []
    assert differing(even, plain) != []


FULL = "  recompute full\n"
PROCESSES = [
    (Case("1f1b", {"P": 1, "M": 2}, "float64"), "even"),
    (Case("zbh1", {"P": 2, "M": 3}, "float32"), "even"),
    (Case("dualpipev", {"P": 2, "M": 4}, "bfloat16"), "even"),
    (Case("1f1b", {"P": 2, "M": 2}, "float64", f"  slices 2\n{FULL}"), "step"),
    (Case("dualpipev", {"P": 2, "M": 4}, "float64"), "step"),
    (Case("zbh1", {"P": 1, "M": 2}, "float32", nodes=2), "even"),
    (Case("1f1b", {"P": 1, "M": 2}, "bfloat16", FULL, nodes=2, method="hierarchical"), "step"),
    (Case("dualpipev", {"P": 1, "M": 2}, "float32", FULL, nodes=2, method="hierarchical"), "even"),
    (Case("1f1b", {"P": 1, "M": 2}, "bfloat16", nodes=2, method="allgather"), "even"),
]


@pytest.mark.processes
@pytest.mark.sweep
def test_processes() -> None:
    """Copies that travel between processes give the bits of pieces at home in one process."""
    cases = swept(PROCESSES, [PROCESSES[7]])
    for answers in pool(4).run("runtime.moe.even_cases:parity", cases=cases, timeout=240):
        assert [wrong for wrong, _ in answers] == [[]] * len(cases)
        assert all(seen > 0 for _, seen in answers)


def test_copies_of_a_step_divide_the_rows_of_each_microbatch() -> None:
    case = Case("zbh1", {"P": 1, "M": 3}, "float64")
    plain, in_place, even = (run(case, way) for way in ("plain", "step in place", "step"))
    fullest = [sum(max(row) / sum(row) for row in way.rows) / len(way.rows) for way in (plain, even)]
    assert fullest[1] < 0.8 * fullest[0]
    assert in_place.rows == plain.rows
    assert differing(even, in_place) == []
    assert [name for name in differing(even, plain) if not name.endswith(EXPERT)] == []
    assert differing(even, plain) != []
    for name, grad in even.gradients.items():
        torch.testing.assert_close(grad, plain.gradients[name], rtol=1e-12, atol=1e-12)


@in_sweeps("test_copies_of_a_step_divide_the_rows_of_each_microbatch", "test_processes")
def test_copies_of_a_step_divide_the_rows_of_each_slice() -> None:
    """The copies are those of whole microbatches, and rows become more even than without."""
    case = Case("1f1b", {"P": 2, "M": 2}, "float64", beside="  slices 2\n")
    plain, in_place, even = (run(case, way) for way in ("plain", "step in place", "step"))
    whole = run(case._replace(beside=""), "step")
    assert [each[1] for each in even.counted] == [each[1] for each in whole.counted]
    assert sum(rows for rows, *_ in even.counted) > 0
    assert len(even.rows) == 2 * len(whole.rows)
    assert sum(map(max, even.rows)) < sum(map(max, plain.rows))
    assert differing(even, in_place) == []
    assert [name for name in differing(even, plain) if not name.endswith(EXPERT)] == []


BOUNDED = [
    ("float32", "grouped", 3.0, "flat"), ("bfloat16", "loop", 8.0, "allgather"),
    ("float64", "loop", 1.1, "hierarchical"), ("bfloat16", "loop", 3.0, "flat"),
    ("float64", "loop", 1.1, "flat"), ("float32", "grouped", 8.0, "hierarchical"),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "products", "bound", "method"), swept(BOUNDED, BOUNDED[2:3]))
def test_copies_of_a_step_in_buffers_of_one_size(dtype: str, products: str, bound: float, method: str) -> None:
    """Bits and counts are those of exact sizes, also where a step has more rows than its buffers and runs again."""
    exact = Case("zbh1", {"P": 1, "M": 3}, dtype, products=products, method=method, nodes=1 if method == "flat" else 2)
    expected = run(exact, "step")
    bounded = run(exact._replace(beside=f"  sizes bounded {bound:g}\n"), "step")
    assert differing(bounded, expected) == []
    assert [(*each[:2], each[3]) for each in bounded.counted] == [(*each[:2], each[3]) for each in expected.counted]
    assert sum(rows for rows, *_ in expected.counted) > 0
    assert any(each[2] for each in bounded.counted) == (bound < 2)


@in_sweeps("test_copies_of_a_step_in_buffers_of_one_size")
def test_rows_of_copies_alone_may_exceed_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts before the plan fit. The step runs again, since rows of two hops travel alone beside copies."""
    monkeypatch.setattr(planner, "bounded_rows", lambda *given, alone: bounded_rows(*given))
    exact = Case("zbh1", {"P": 1, "M": 3}, "float32", products="grouped", method="hierarchical", nodes=2)
    small = exact._replace(beside="  sizes bounded 3\n")
    expected, plain, bounded = run(exact, "step"), run(small, "plain"), run(small, "step")
    assert differing(bounded, expected) == []
    assert any(each[2] for each in bounded.counted)
    assert not any(each[2] for each in plain.counted)


def test_the_state_of_copies_goes_on_and_a_failed_step_keeps_it() -> None:
    case = Case("zbh1", {"P": 1, "M": 2}, "float64")

    def fresh() -> Pipeline:
        return pipeline(case.schedule, case.sizes, case.lines("step"), skewed(1.0, experts=16, top=3))

    pipe, later = fresh(), fresh()
    assert not any(any(held) for held in pipe.balance_state().values())
    step(pipe, 1)
    state = pipe.balance_state()
    assert all(any(held) for held in state.values())
    layers = layers_of(pipe)

    def broken(*_: object) -> None:
        raise ValueError("broken")

    hook = layers[1].experts.register_forward_hook(broken)
    with pytest.raises(Exception, match="broken"):
        step(pipe, 2)
    hook.remove()
    assert pipe.balance_state() == state
    batch = torch.zeros(16, 6, dtype=torch.int64)
    copied = layers[0].statistics.copied_rows
    pipe.evaluate(batch, batch)
    assert (pipe.balance_state(), layers[0].statistics.copied_rows) == (state, copied)
    later.load_balance_state(state)
    for each in (pipe, later):
        each.zero_grad()
        step(each, 2)
    for name, grad in gradients(pipe).items():
        assert torch.equal(grad, gradients(later)[name]), name
    assert later.balance_state() == pipe.balance_state() != state
    alone = fresh()  # the same step without copies asks for the same: the next step follows the router's rows
    step(alone, 2)
    assert alone.balance_state() == pipe.balance_state()
    for each in (pipe, alone):  # the same copies again, of other weights
        each.load_balance_state(state)
        scale(each, 0.5)
        each.zero_grad()
        step(each, 2)
    for name, grad in gradients(pipe).items():
        assert torch.equal(grad, gradients(alone)[name]), name
    assert sum(layer.statistics.copied_rows for layer in layers) > 0
    name = next(iter(state))
    for held, message in (
        ([[], [], []], "3 ranks"), ([[0], [], [], []], r"copies \[0\] of rank 0"), ([[4, 8], [], [], []], "of rank 0"),
        ([[4, 5, 6, 7], [], [], []], "3 slots"), ([[4], [0], [], []], "in a circle"),
        ([[16], [], [], []], "16 experts"),
    ):  # fmt: skip
        with pytest.raises(RuntimeFault, match=message):
            later.load_balance_state({**state, name: held})


@pytest.mark.sweep
@pytest.mark.parametrize(("host_lane", "by_step"), thinned(product((False, True), repeat=2), 3))
@pytest.mark.parametrize("method", METHODS)
def test_the_graph_has_copies_in_the_node_and_numbers_of_rows(method: Method, host_lane: bool, by_step: bool) -> None:
    """Numbers of rows travel among all ranks, in the queue of the routing; copies travel in the node."""
    model = skewed()
    even = EvenRows(by_step=by_step, over_node=True)
    shard_experts(model, in_process_expert_groups(4, 2)[0], method, even=even, host_lane=host_lane)
    (stage,) = partition(nn.Sequential(*model.blocks), 1, blocks="").modules
    shape = stage_graph(stage, 1, ["0"]).shape
    assert shape == stage_shape(
        ["dense", "moe", "moe"], method, hot=None if by_step else Lane.NODE, distinct=method != "flat", balance=True,
        sizes=host_lane,
    )  # fmt: skip
    if method != "flat":
        told = shape.names.index("1.distinct.rail")
        assert (shape.queues[told], scope(shape, told)) == ("counts", "expert")


def test_refused() -> None:
    with pytest.raises(RuntimeFault, match=r"rows within 0\.99 of the mean"):
        EvenRows(Fraction("0.99"))
    with pytest.raises(RuntimeFault, match="0 slots"):
        EvenRows(by_step=True, slots=0)
    group = in_process_expert_groups(4, 4)[0]
    lender = EvenLender(EvenRows(by_step=True, over_node=True), Experts(8, 2, 2), in_process_expert_groups(4, 2)[0])
    lender.local = 2
    assert not lender.refusal(((), (0,), (6,), ()))
    assert "another node" in lender.refusal(((), (4,), (), ()))
    with pytest.raises(RuntimeFault, match="balance by microbatch, and alltoall hierarchical over several nodes"):
        shard_experts(small_moe(), in_process_expert_groups(4, 2)[0], "hierarchical", even=EvenRows())
    with pytest.raises(RuntimeFault, match="balance by microbatch, and bounded sizes"):
        shard_experts(small_moe(), group, bound=1.5, even=EvenRows())
    model = small_moe()
    for _, layer in moe_layers(model):
        layer.experts.down = torch.nn.Parameter(
            layer.experts.down.detach().transpose(1, 2).contiguous().transpose(1, 2)
        )
    with pytest.raises(RuntimeFault, match="weights of experts that are stored by columns"):
        shard_experts(model, group, even=EvenRows())
