"""Dispatch and combine: three methods with the same bits, their bytes, and the collectives under them."""

from __future__ import annotations

import math
from dataclasses import replace
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.moe.exchange_cases import METHODS, Case, Data, alike, data_of, plain, run_in_process, shape_of
from runtime.moe.stored_bits import digests, stored
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.counts import Counts, Flag, Method, Shape, ascending, counted_rows, counts_of_experts
from schedc_runtime.moe.routes import Route, arrive, collect, pack, plan_route, relay_back
from schedc_runtime.moe.sizes import check_flags
from schedc_runtime.ranks.expert_group import ExpertGroup, in_process_expert_groups
from schedc_runtime.testing import pool
from schedc_runtime.transport.base import MessageMismatch
from schedc_runtime.transport.collectives import SoloCommunicator
from schedc_runtime.transport.collectives_in_process import InProcessCommunicators
from support.sweeps import halved, swept

GROUPS = [(1, 1), (1, 4), (4, 1), (2, 2), (4, 2), (2, 4)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes, per_node = draw(st.sampled_from(GROUPS))
    tokens = draw(st.lists(st.integers(0, 9), min_size=nodes * per_node, max_size=nodes * per_node))
    if not any(tokens):
        tokens[-1] = 3
    return Case(
        nodes, per_node, tuple(tokens),
        experts=8 * draw(st.integers(1, 2)),
        top=draw(st.integers(1, 6)),
        width=3,
        routing=draw(st.sampled_from(["random", "one"])),
        capacity=draw(st.sampled_from([None, None, 1, 3, 100])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(25, 12))
@given(cases())
def test_methods_agree_bit_by_bit_and_with_plain_autograd(case: Case) -> None:
    data = data_of(case)
    flat, *others = [
        run_in_process(case, data, in_process_expert_groups(case.ranks, case.per_node), method) for method in METHODS
    ]
    for results in others:
        for mine, theirs in zip(flat, results, strict=True):
            assert alike(mine.tensors, theirs.tensors)
            assert mine.route.sizes.counts == theirs.route.sizes.counts
    if case.dtype == torch.float64:
        outputs, xs, weights, matrices = plain(case, data)
        for rank, result in enumerate(flat):
            wanted = outputs[rank], xs[rank], weights[rank], matrices.chunk(case.ranks)[rank]
            torch.testing.assert_close(result.tensors, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(12, 6))
@given(cases(), st.sampled_from([1.0, 1.5, 3.0, 100.0]))
def test_bounded_buffers_change_no_bit_and_tell_when_they_are_too_small(case: Case, bound: float) -> None:
    """Rows behind the last expert's are NaN here, as products may leave them."""
    exact = replace(case, capacity=None)
    data = data_of(exact)
    expected = run_in_process(exact, data, in_process_expert_groups(case.ranks, case.per_node), "flat")
    for method in METHODS:
        groups = in_process_expert_groups(case.ranks, case.per_node)
        results = run_in_process(replace(exact, bound=bound), data, groups, method)
        flags = [int(flag) for flag in results[0].route.counts.all_flags]
        if bound == 100:
            assert not any(flags)
        for mine, theirs in zip(results, expected, strict=True):
            assert mine.route.counts.all_flags.tolist() == flags
            rooms = {room for each in mine.route.sizes.hops.values() for room in each.send}
            assert len(rooms) <= len(mine.route.sizes.hops)
            if any(flags):
                assert set(flags) <= {0, Flag.OVERFLOW}
            else:
                assert alike(mine.tensors, theirs.tensors)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("method", METHODS)
def test_all_tokens_on_one_expert_overflow_a_bound_of_the_mean(method: Method) -> None:
    case = Case(2, 2, (5, 5, 0, 5), top=1, routing="one", bound=1.0)
    (first, *_) = run_in_process(case, data_of(case), in_process_expert_groups(4, 2), method)
    assert [int(flag) for flag in first.route.counts.all_flags] == [Flag.OVERFLOW, Flag.OVERFLOW, 0, Flag.OVERFLOW]


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2), (4, 2)])
@pytest.mark.parametrize("top", [1, 4])
def test_bytes_that_leave_a_node(nodes: int, per_node: int, top: int) -> None:
    case = Case(nodes, per_node, (300,) * (nodes * per_node), top=top, dtype=torch.float32)
    data = data_of(case)
    sent = {
        method: sum(r.bytes for r in run_in_process(case, data, in_process_expert_groups(case.ranks, per_node), method))
        for method in METHODS
    }
    assert sent == counted_bytes(case, data)
    rows = {m: (sent[m] - weights_and_routing(case, data)[m]) / (4 * 4 * case.width) for m in METHODS}
    tokens, away = sum(case.tokens), 1 - 1 / nodes
    experts, here = case.experts, case.experts // nodes
    missed = comb(experts - here, top) / comb(experts, top)
    expected = {"flat": top * away, "hierarchical": (nodes - 1) * (1 - missed), "allgather": nodes - 1}
    for method, copies in expected.items():
        assert rows[method] / tokens == pytest.approx(copies, rel=0.06)


def counted_bytes(case: Case, data: Data) -> dict[str, int]:
    """Bytes that leave a node, counted token by token: rows there, back, and the gradients of both; weights."""
    copies = dict.fromkeys(METHODS, 0)
    for rank, index in enumerate(data.index):
        home = rank // case.per_node
        for chosen in index.tolist():
            nodes = [e // (case.experts // case.nodes) for e in chosen]
            copies["flat"] += sum(node != home for node in nodes)
            copies["hierarchical"] += len(set(nodes) - {home})
            copies["allgather"] += case.nodes - 1
    more = weights_and_routing(case, data)
    return {method: 4 * 4 * case.width * copies[method] + more[method] for method in METHODS}


def weights_and_routing(case: Case, data: Data) -> dict[str, int]:
    """Gate weights travel there, their gradients back; two hops also send the experts' numbers of a row.

    The counts go from every rank to every other.
    """
    pairs = sum(
        e // (case.experts // case.nodes) != rank // case.per_node
        for rank, index in enumerate(data.index)
        for e in index.flatten().tolist()
    )
    copies = dict.fromkeys(METHODS, 0)
    for rank, index in enumerate(data.index):
        away = [{e // (case.experts // case.nodes) for e in row} - {rank // case.per_node} for row in index.tolist()]
        copies["hierarchical"] += sum(map(len, away))
        copies["allgather"] += len(index) * (case.nodes - 1)
    columns = {method: shape_of(case, 0, method).columns for method in METHODS}
    return {
        method: (2 * 4 * pairs if method == "flat" else (2 + 2 * 4) * case.top * copies[method])
        + 4 * columns[method] * case.ranks * (case.ranks - case.per_node)
        for method in METHODS
    }


@pytest.mark.slow
@pytest.mark.usefixtures("watched")
def test_padded_shapes_do_not_depend_on_the_routing() -> None:
    shapes = []
    for routing, seed in (("random", 0), ("random", 1), ("one", 0)):
        case = Case(2, 2, (7, 7, 7, 7), routing=routing, capacity=2, seed=seed, width=2)
        data = data_of(case)
        of_routes = [
            [
                (r.route.sizes.hops, r.route.sizes.counts)
                for r in run_in_process(case, data, in_process_expert_groups(4, 2), method)
            ]
            for method in METHODS
        ]
        shapes.append(of_routes)
    assert shapes[0] == shapes[1] == shapes[2]
    assert shapes[0][0][0][1] == (2 * 4,) * 4


@pytest.mark.processes
def test_over_gloo() -> None:
    for answer in pool(4).run("runtime.moe.exchange_cases:over_gloo", per_node=2, tokens=[9, 0, 4, 7], seed=3):
        assert answer["wrong"] == []
        for sent, expected in answer["bytes"].values():
            assert sent == expected


@pytest.mark.processes
def test_collectives_over_gloo() -> None:
    assert pool(4).run("runtime.moe.exchange_cases:collectives_over_gloo") == [[]] * 4


@pytest.mark.processes
def test_a_lost_collective_over_gloo_is_named() -> None:
    text = pool(4).run("runtime.moe.exchange_cases:lost_over_gloo")[0]
    assert text.startswith("communicator rail 1, collective 0 (all_gather `routing`), rank 0 of 4: ")
    assert "gloo/transport" not in text


@pytest.mark.usefixtures("watched")
def test_a_sum_is_added_in_the_order_of_members() -> None:
    group = InProcessCommunicators(3)
    parts = [torch.tensor([1e8, 0.1]), torch.tensor([1.0, 0.2]), torch.tensor([-1e8, 0.3])]
    handles = [(group.member(rank), group.member(rank).sum(parts[rank])) for rank in (2, 0, 1)]
    expected = (parts[0] + parts[1]) + parts[2]
    for member, handle in handles:
        assert torch.equal(member.wait(handle), expected)
    assert group.unmatched() == 0


@pytest.mark.usefixtures("watched")
def test_a_collective_is_complete_when_all_have_started_it() -> None:
    group = InProcessCommunicators(2)
    a, b = group.member(0), group.member(1)
    first = a.all_gather(torch.tensor([1]), "routing")
    assert not a.ready(first)
    with pytest.raises(RuntimeError, match=r"collective 0 \(all_gather `routing`\), rank 0 of 2: waited for before"):
        a.wait(first)
    second = b.all_gather(torch.tensor([2]), "routing")
    assert a.ready(first)
    assert a.wait(first).tolist() == b.wait(second).tolist() == [[1], [2]]
    with pytest.raises(RuntimeError, match="waited for twice"):
        a.wait(first)


@pytest.mark.parametrize(
    ("mine", "theirs", "shown"),
    [
        (
            lambda c: c.all_gather(torch.zeros(2), "routing"),
            lambda c: c.all_to_all((torch.zeros(2, 4),), [1, 1], [1, 1], "dispatch"),
            "rank 1 starts all_to_all `dispatch` where rank 0 has started all_gather `routing`",
        ),
        (
            lambda c: c.all_to_all((torch.zeros(3, 4),), [1, 2], [1, 2], "dispatch"),
            lambda c: c.all_to_all((torch.zeros(3, 4),), [2, 1], [1, 2], "dispatch"),
            "rank 0 sends 2 rows to rank 1, which expects 1",
        ),
        (
            lambda c: c.sum(torch.zeros(3)),
            lambda c: c.sum(torch.zeros(3, dtype=torch.float64)),
            r"rank 1 brings \['float64\[3\]'\] where rank 0 brings \['float32\[3\]'\]",
        ),
    ],
)
def test_a_mismatch_names_the_collective_and_both_ranks(mine, theirs, shown: str) -> None:  # type: ignore[no-untyped-def]
    group = InProcessCommunicators(2, "expert")
    mine(group.member(0))
    with pytest.raises(MessageMismatch, match=f"communicator expert, collective 0.*{shown}"):
        theirs(group.member(1))


def test_what_does_not_fit_is_refused() -> None:
    solo = SoloCommunicator()
    with pytest.raises(MessageMismatch, match="3 rows to send where the splits have 2"):
        solo.all_to_all((torch.zeros(3, 1),), [2], [2])
    with pytest.raises(MessageMismatch, match="splits for 2 members in a group of 1"):
        solo.all_to_all((torch.zeros(3, 1),), [2, 1], [3])
    with pytest.raises(RuntimeFault, match="6 ranks cannot be cut into nodes of 4"):
        in_process_expert_groups(6, 4)
    route = route_of(torch.tensor([[[0]]]), Shape(8))
    with pytest.raises(ValueError, match="a flat one has none"):
        relay_back(route, torch.zeros(1, 2))
    with pytest.raises(ValueError, match="rows come back before they have left"):
        collect(route, torch.zeros(1, 2))
    with pytest.raises(ValueError, match="the experts' numbers of the rows have not landed"):
        arrive(route_of(torch.tensor([[[0]]]), Shape(8, method="hierarchical")), torch.zeros(1, 2), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("index", "weight", "capacity", "message"),
    [
        ([[8, 1]], [[1.0, 1.0]], None, "rank 1 of the expert group chooses an expert whose number is out of range"),
        ([[0, 1]], [[1.0, math.nan]], None, "rank 1 of the expert group has a score that is not a number"),
        ([[3, 3]], [[1.0, 1.0]], None, "rank 1 of the expert group chooses an expert twice for one token"),
        ([[3, 1], [3, 2]], [[1.0, 1.0]] * 2, 1, "rank 1 of the expert group gives an expert more rows"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_choices_that_cannot_be_are_flagged_to_all_ranks(
    index: list[list[int]], weight: list[list[float]], capacity: int | None, message: str, method: Method
) -> None:
    """The flags travel with the counts; ranks that chose rightly raise the same error before the first row leaves."""
    right, wrong = torch.tensor([[0, 1], [2, 3]][: len(index)]), torch.tensor(index)
    shapes = [Shape(8, 1, 2, rank, method, capacity, len(index)) for rank in range(2)]
    told = [
        counted_rows(ascending(right, 8), right, shapes[0], torch.ones(right.shape)),
        counted_rows(ascending(wrong, 8), wrong, shapes[1], torch.tensor(weight)),
    ]
    for rank, own in enumerate((right, wrong)):
        counts = Counts(torch.stack(told), shapes[rank])
        with pytest.raises(RuntimeFault, match=f"layer 3, microbatch 2: {message}"):
            check_flags(counts.flags.tolist(), "layer 3, microbatch 2")
        if capacity is None:
            route = plan_route(ascending(own, 8), counts, "layer 3, microbatch 2")
            with pytest.raises(RuntimeFault, match=message):
                route.splits("flat", False)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("dtype", halved([torch.float64, torch.float32]))
@pytest.mark.parametrize("method", METHODS)
def test_bits_are_those_that_were_stored(method: Method, dtype: torch.dtype) -> None:
    assert digests(dtype, method) == stored(dtype)


def route_of(everyone: torch.Tensor, shape: Shape) -> Route:
    """The route of everyone's choices [ranks, N, k]."""
    return plan_route(ascending(everyone[shape.rank], shape.experts), counts_of_experts(everyone, shape))


def test_solo_is_the_layer_of_one_rank() -> None:
    route = route_of(torch.tensor([[[2, 0], [1, 2]]]), Shape(3, method="hierarchical"))
    x = torch.tensor([[1.0], [10.0]])
    rows, weights, ids = pack(route, x, torch.tensor([[0.5, 0.25], [2.0, 4.0]]))
    assert rows.tolist() == [[1.0], [10.0]]
    assert ids.tolist() == [[0, 2], [1, 2]]
    assert weights.tolist() == [[0.25, 0.5], [2.0, 4.0]]
    assert route.sizes.counts == (1, 1, 2)
    assert collect(route, rows).tolist() == x.tolist()
    assert ExpertGroup.solo().bytes_leaving_node() == 0
