"""Hot experts by step: chosen from the last step's rows, the same bits in every order, nothing left after a failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.moe.hot_cases import gradients, layers_of, lent, pipeline, skewed, step
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc_runtime import Pipeline
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.counts import Counts, Shape, ascending, counted_rows
from schedc_runtime.moe.hot import Lending
from schedc_runtime.moe.hot_choice import MARGIN, HotPolicy, HotTimes, choose_for_step
from schedc_runtime.moe.hot_slots import HotLender, LentNumbers
from schedc_runtime.moe.step_lender import LentRoom
from schedc_runtime.transport.collectives_in_process import InProcessCommunicators
from support.segmented_cases import unequal
from support.sweeps import in_sweeps, swept

HOT = "  hot 2 until imbalance < 1.1"


def lines_of(nodes: int, per_node: int, method: str = "hierarchical") -> str:
    return f"  experts 8 top 2\n  topology nodes {nodes} x {per_node}\n  alltoall {method}\n  overlap auto\n"


def trained(schedule: str, sizes: dict[str, int], lines: str, steps: int) -> tuple[Pipeline, Any]:
    """A pipeline after ``steps`` steps, and the gradients of each."""
    pipe = pipeline(schedule, sizes, lines, skewed(2.0))
    history = []
    for seed in range(1, steps + 1):
        pipe.zero_grad()
        step(pipe, seed)
        history.append(gradients(pipe))
    return pipe, history


# The choice.


@pytest.mark.slow
@settings(max_examples=100)
@given(
    rows=st.integers(2, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.integers(0, 60), min_size=2 * ranks, max_size=2 * ranks), min_size=ranks, max_size=ranks
        )
    ),
    most=st.integers(1, 2),
    copy=st.integers(0, 60),
    on=st.booleans(),
)
def test_what_is_chosen_pays_and_leaves_the_fullest_rank_with_less(
    rows: list[list[int]], most: int, copy: int, on: bool
) -> None:
    table, ranks = torch.tensor(rows), len(rows)
    hot = choose_for_step(table, HotPolicy(most, None, False, copy).resolved(2, 4, 4), 1, on)
    before = table.sum(0).view(ranks, -1).sum(1)
    lending = Lending(hot, ranks, 0, 2)
    after = [
        sum(rows[source][expert] for source in range(ranks) for expert in (2 * rank, 2 * rank + 1)
            if expert not in hot or source == rank)
        + sum(rows[rank][expert] for expert in Lending(hot, ranks, rank, 2).lent_to(rank))
        for rank in range(ranks)
    ]  # fmt: skip
    assert len(hot) <= most
    assert list(hot) == sorted(set(lending.hot))
    if hot:
        left = int(before.max()) - max(after)
        assert left >= MARGIN * before.double().mean()
        assert left > copy * len(hot)


def test_copies_are_judged_by_times_where_these_are_known() -> None:
    rows = torch.tensor([[0, 0, 400, 100, 50, 50, 50, 50]] * 4)  # rank 1 has 2.86 times the mean
    by_bytes = HotPolicy().resolved(2, 2048, 2, 4)
    assert by_bytes.times == HotTimes(copy=3 * 2048 * 3)
    assert choose_for_step(rows, by_bytes, 1) == ()
    assert choose_for_step(rows * 40, by_bytes, 40) == (2,)  # the rows of a step count together
    slow = CellCosts.of({"experts": SegmentTimes(20, 20, 20)}, {"dispatch.node": 0.01})
    assert choose_for_step(rows, HotPolicy(costs=slow).resolved(2, 2048, 2, 4), 1) == (2,)
    dear = CellCosts.of({"experts": SegmentTimes(1, 1, 1)}, {"dispatch.node": 9})
    assert choose_for_step(rows, HotPolicy(costs=dear).resolved(2, 2048, 2, 4), 1) == ()
    beside = CellCosts.of({"attention": SegmentTimes(1e6), "experts": SegmentTimes(1, 1, 1)}, {"dispatch.node": 9})
    assert choose_for_step(rows, HotPolicy(1, costs=beside).resolved(2, 2048, 2, 4), 1) == (2,)
    nearly = torch.tensor([[10, 10, 10, 11]] * 4)
    assert choose_for_step(nearly, HotPolicy(costs=beside).resolved(1, 2048, 2, 4), 1) == ()  # noise
    assert choose_for_step(rows * 0, by_bytes, 1) == ()


def test_choices_are_numbered_with_slots_as_experts_of_their_own() -> None:
    """Counts made with the slots give the rows of every expert, as counts without them."""
    generator = torch.Generator().manual_seed(0)
    everyone = torch.rand(4, 16, 8, generator=generator).argsort(-1)[..., :2]
    everyone[0, 0] = torch.tensor([-1, 9])
    plain, tables, kept = [], [], []
    for rank, index in enumerate(everyone):
        lending = Lending((0, 1, 6), 4, rank, 2)
        numbering = LentNumbers.of(lending, 8, torch.device("cpu"))
        wide = Shape(8 + 4 * 3, 1, 4, rank)
        placed = numbering.place(index)
        tables.append(counted_rows(ascending(placed, wide.experts), placed, wide))
        plain.append(counted_rows(ascending(index, 8), index, Shape(8, 1, 4, rank)))
        kept.append(sum(int((index == expert).sum()) for expert in lending.lent_to(rank)))
    wider, whole = Counts(torch.stack(tables), wide), Counts(torch.stack(plain), Shape(8, 1, 4))
    assert torch.equal(numbering.rows(wider.rows), whole.rows)
    assert [int(numbering.kept(wider.rows, rank)) for rank in range(4)] == kept
    assert torch.equal(wider.flags, whole.flags)
    assert int(wider.flags[0]) == 1  # the expert out of range


# Training.


@in_sweeps("runtime/moe/test_hot.py::test_on_and_off_over_steps")
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.usefixtures("watched")
def test_the_first_step_lends_none_and_later_ones_change_rounding_alone() -> None:
    sizes = {"P": 1, "M": 1}
    plain, without = trained("zbh1", sizes, lines_of(2, 1), 2)
    loads = [layer.loads.chosen.clone() for layer in layers_of(plain)]
    results = []
    for method in ("flat", "hierarchical", "allgather")[: swept(3, 2)]:
        pipe, history = trained("zbh1", sizes, lines_of(2, 1, method) + HOT, 2)
        assert unequal(history[0], without[0]) == []
        assert unequal(history[1], without[1]) != []
        torch.testing.assert_close(history[1], without[1], rtol=1e-9, atol=1e-12)
        assert all(torch.equal(x.loads.chosen, load) for x, load in zip(layers_of(pipe), loads, strict=True))
        assert lent(pipe)["hot_rows"] > 0
        results.append(history[1])
    assert [unequal(results[0], other) for other in results[1:]] == [[]] * swept(2, 1)
    pipe.update_biases()
    assert lent(pipe) == {"hot_experts": 0, "hot_rows": 0, "hot_bytes_sent": 0, "hot_bytes_saved": 0}


@in_sweeps("runtime/moe/test_hot.py::test_any_legal_order_gives_the_same_bits")
@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(
    ("orders", "replicas"), [((("zbh1", 1), ("1f1b", 1)), (1, 2)), *swept([((("dualpipe", 2),) * 2, (2, 1))], [])]
)
def test_bits_do_not_depend_on_the_order(orders: Any, replicas: tuple[int, int]) -> None:
    """Nor does a step depend on what is held beside it: all slots come back before copies of a stage are summed."""
    found = [trained(name, {"P": p, "M": 2 * p}, lines_of(*replicas) + HOT, 2) for name, p in orders]
    assert all(lent(pipe)["hot_rows"] > 0 for pipe, _ in found)
    for _, history in found[1:]:
        assert unequal(history[1], found[0][1][1]) == []


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_same_bits() -> None:
    arguments = ("zbh1", {"P": 1, "M": 2}, lines_of(1, 2) + HOT)
    pipe, history = trained(*arguments, 3)
    before, _ = trained(*arguments, 2)
    state = before.balance_state()
    assert any(any(held) for held in state.values())
    later = pipeline(*arguments, skewed(2.0))
    later.load_balance_state(state)
    assert later.balance_state() == state
    step(later, 3)
    assert unequal(gradients(later), history[2]) == []
    assert later.balance_state() == pipe.balance_state()
    fresh = pipeline(*arguments, skewed(2.0))
    step(fresh, 3)
    assert unequal(gradients(fresh), history[2]) != []
    name = next(iter(state))
    for wrong, message in (
        ({}, f"lacks `{name}`"), ({**state, "x": []}, "has `x`"), ({**state, name: [8]}, r"\[8\]"),
        ({**state, name: [[1], [1]]}, r"copies \[\[1\], \[1\]\]"), ({**state, name: [1, 2, 3]}, "2 slots"),
    ):  # fmt: skip
        with pytest.raises(RuntimeFault, match=message):
            later.load_balance_state(wrong)


@in_sweeps(
    "runtime/moe/test_even_rows.py::test_the_state_of_copies_goes_on_and_a_failed_step_keeps_it",
    "runtime/moe/test_hot.py::test_on_and_off_over_steps",
)
@pytest.mark.slow
@pytest.mark.usefixtures("watched")
def test_a_failed_step_and_an_evaluation_leave_nothing_lent() -> None:
    arguments = ("zbh1", {"P": 1, "M": 2}, lines_of(1, 2) + HOT)
    pipe, _ = trained(*arguments, 1)
    state = pipe.balance_state()
    layer = layers_of(pipe)[1]

    def broken(*_: Any) -> None:
        raise ValueError("broken")

    hook = layer.experts.register_forward_hook(broken)
    with pytest.raises(Exception, match="broken"):
        step(pipe, 2)
    hook.remove()
    assert all(isinstance(layer.lender, HotLender) and not layer.lender.lending.hot for layer in layers_of(pipe))
    assert pipe.balance_state() == state  # that of the last good step
    pipe.zero_grad()
    step(pipe, 2)
    _, history = trained(*arguments, 2)
    assert unequal(gradients(pipe), history[1]) == []
    before = pipe.balance_state()
    batch = torch.zeros(16, 6, dtype=torch.int64)
    pipe.evaluate(batch, batch)
    assert pipe.balance_state() == before


@pytest.mark.slow
def test_frozen_experts_and_narrow_weights() -> None:
    """Slots of frozen stacks have no gradients. Those of bfloat16 weights are summed in float32."""
    pipe = pipeline("zbh1", {"P": 1, "M": 2}, lines_of(1, 2) + HOT, skewed(2.0))
    for layer in layers_of(pipe):
        layer.experts.down.requires_grad_(False)
    for seed in (1, 2):
        step(pipe, seed)
    assert lent(pipe)["hot_rows"] > 0
    assert all(layer.experts.down.grad is None for layer in layers_of(pipe))
    room = LentRoom()
    experts = layers_of(pipe)[0].experts.to(torch.bfloat16)
    experts.down.requires_grad_(True)
    room.open(experts, 2)
    (_, down), one = room.parameters, torch.ones(2, *experts.down.shape[1:], dtype=torch.bfloat16)
    for _ in range(2):
        (down * (one / 256 + 0.5)).sum().backward()
    (down * (one / 256)).sum().backward()
    gate_up, total = room.sums()
    assert total.dtype == gate_up.dtype == torch.float32
    assert torch.equal(total, torch.full_like(total, 2 * 0.50390625 + 0.00390625))
    assert room.nbytes == sum(tensor.numel() for tensor in room.weights) * (2 + 4)
    kept = room.parameters
    room.open(experts, 2)
    assert room.parameters is kept
    assert not bool(room.sums()[1].any())


def test_a_tensor_comes_from_one_member_and_a_sum_goes_to_one() -> None:
    group = InProcessCommunicators(3, "hot")
    members = [group.member(rank) for rank in range(3)]
    tensors = [torch.full((5,), 0.1 * (rank + 1), dtype=torch.float32) for rank in range(3)]
    expected = tensors[0] + tensors[2]
    handles = [member.reduce(tensor, 1) for member, tensor in zip(members, tensors, strict=True)]
    for member, handle in zip(members, handles, strict=True):
        member.wait(handle)
    assert torch.equal(tensors[1], expected)
    handles = [member.broadcast(tensor, 1) for member, tensor in zip(members, tensors, strict=True)]
    received: list[Tensor] = [member.wait(handle) for member, handle in zip(members, handles, strict=True)]
    assert all(torch.equal(tensor, expected) for tensor in (*received, *tensors))
    assert [sum(member.sent) for member in members] == [5 * 4 + 2 * 4, 2 * 5 * 4, 5 * 4 + 4]
