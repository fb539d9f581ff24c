"""Routers, experts, capacity and the layer: ties, balance, deferred gradients, and parity with plain autograd."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from runtime.moe.moe_cases import ROUTING, WIDTH, plain, small_layer, tokens
from schedc.step.costs import exchange
from schedc_runtime.data_parallel.gradient_sums import is_expert
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.moe.balance import AuxiliaryLoss, Tally, load_of, loss_slope, updated_bias
from schedc_runtime.moe.capacity import ExpertCapacity, kept_choices
from schedc_runtime.moe.counts import METHODS
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import Router, RouterConfig, choose_experts
from schedc_runtime.moe.shards import join_shards, local_state, parameters_of_experts, shard_experts
from schedc_runtime.ranks.exchange import Exchange
from schedc_runtime.ranks.expert_group import ExpertGroup, in_process_expert_groups
from schedc_runtime.stage.split import SplitBackward
from schedc_runtime.testing import pool
from support.moe_layers import set_loss_scale

torch.set_num_threads(1)


def chosen_slowly(row: list[float], k: int, groups: int, kept_groups: int) -> list[int]:
    """The definition: sort by (score descending, id ascending), in the groups with the best two experts."""
    size = len(row) // groups
    parts = [row[g * size : (g + 1) * size] for g in range(groups)]
    strength = [sum(sorted(part, reverse=True)[:2]) for part in parts]
    best = sorted(range(groups), key=lambda g: (-strength[g], g))[:kept_groups]
    allowed = [e for e in range(len(row)) if e // size in best]
    return sorted(allowed, key=lambda e: (-row[e], e))[:k]


@given(st.data())
@settings(max_examples=60)
def test_the_best_experts_are_chosen_and_of_ties_the_lowest_ids(data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(1, 5))
    kept_groups = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, kept_groups * size))
    # Few different scores, all exact in binary: most are equal to another.
    rows = data.draw(
        st.lists(
            st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=groups * size, max_size=groups * size),
            min_size=1,
            max_size=5,
        )
    )
    chosen = choose_experts(torch.tensor(rows), k, groups, kept_groups).tolist()
    assert chosen == [chosen_slowly(row, k, groups, kept_groups) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "nodes", "per_node"),
    [((256, 8, 8, 4), 8, 8), ((96, 8, 6, 2), 4, 6), ((64, 6, 16, 5), 4, 4), ((24, 3, 24, 5), 2, 3)],
)
def test_rows_of_limited_groups_are_those_of_the_router(
    sizes: tuple[int, int, int, int], nodes: int, per_node: int
) -> None:
    """Nodes and ranks that 20,000 tokens reach, with uniform scores: within 1 % of what plans are priced with."""
    experts = sizes[0]
    scores = torch.rand(20_000, experts, generator=torch.Generator().manual_seed(0))
    chosen = choose_experts(scores, *sizes[1:])
    reached = [
        torch.zeros(len(chosen), parts).scatter_(1, chosen // (experts // parts), 1.0).sum(1).mean().item()
        for parts in (nodes, nodes * per_node)
    ]
    topology, routing = exchange.Topology(nodes, per_node), exchange.Routing(*sizes)
    expected = exchange.rows("hierarchical", routing, topology).rail
    assert expected == pytest.approx(reached[0] * (1 - 1 / nodes), rel=0.01)
    assert exchange.arrivals("hierarchical", routing, topology) == pytest.approx(reached[1], rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_choices_are_those_of_a_stable_sort(dtype: torch.dtype) -> None:
    """Scores of both signs, zeros of both signs, infinities, ties within and across the k-th; and any strides."""
    torch.manual_seed(0)
    scores = (torch.randn(300, 24) * 4).round().div(4).to(dtype)
    scores[0], scores[1, ::2], scores[2], scores[2, 5:20] = 0.0, -0.0, float("-inf"), 1e-45
    scores[3, 7], scores[4] = float("inf"), torch.finfo(dtype).tiny * torch.randn(24).sign()
    for each in (scores, scores.t().contiguous().t()):
        expected = each.argsort(dim=-1, descending=True, stable=True)
        assert all(torch.equal(choose_experts(each, k), expected[:, :k]) for k in (1, 7, 24))
    assert choose_experts(scores[:0], 3).shape == (0, 3)


def test_choices_of_scores_that_are_not_numbers_are_experts() -> None:
    scores = torch.randn(4, 8)
    scores[0], scores[1, 3] = float("nan"), float("nan")
    index = choose_experts(scores, 3)
    assert index.min() >= 0
    assert index.max() < 8
    assert all(len(set(row)) == 3 for row in index.tolist())


def test_softmax_and_sigmoid_weights() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 6, dtype=torch.float64)
    router = Router(6, RouterConfig(8, 3)).double()
    index, weight, shares = router(x)
    logits = x @ router.weight.T
    best = logits.softmax(-1).gather(1, index)
    torch.testing.assert_close(weight, best / best.sum(-1, keepdim=True))
    torch.testing.assert_close(shares, logits.softmax(-1))

    router.routing = RouterConfig(8, 3, scores="sigmoid", normalise=False, scale=2.5, biased=True)
    router.bias = torch.zeros(8, dtype=torch.float64)
    router.bias[5] = 9.0  # so large that expert 5 is everyone's first, but no part of its weight
    index, weight, shares = router(x)
    assert index[:, 0].tolist() == [5] * 7
    torch.testing.assert_close(weight, 2.5 * logits.sigmoid().gather(1, index))
    torch.testing.assert_close(shares.sum(-1), torch.ones(7, dtype=torch.float64))


def test_scores_are_computed_in_at_least_float32() -> None:
    router = Router(6, RouterConfig(8, 3)).bfloat16()
    x = torch.randn(5, 6).bfloat16()
    assert router(x)[1].dtype == torch.float32
    logits = functional.linear(x.float(), router.weight.float())
    assert torch.equal(router(x)[2], logits.softmax(-1))
    router.routing = RouterConfig(8, 3, exact_logits=False)
    assert torch.equal(router(x)[2], functional.linear(x, router.weight).float().softmax(-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 9}, "top 9 of 8 experts"),
        ({"groups": 3}, "8 experts in 3 groups"),
        ({"groups": 4, "limit": 5}, "5 kept of 4 groups"),
        ({"groups": 4, "limit": 1, "top": 3}, "top 3 of 1 groups of 2 experts"),
        ({"scores": "tanh"}, "scores=`tanh`"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        RouterConfig(**{"experts": 8, "top": 2} | options)  # type: ignore[arg-type]


def test_the_bias_moves_against_the_load_and_balances_the_choice() -> None:
    bias = updated_bias(torch.zeros(3), torch.tensor([4, 1, 1]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5]
    assert updated_bias(bias, torch.tensor([2, 2, 2]), 0.5).tolist() == bias.tolist()

    torch.manual_seed(0)
    router = Router(4, RouterConfig(8, 2, scores="sigmoid", biased=True, bias_rate=0.02))
    assert router.bias is not None
    x = torch.randn(400, 4) + 1.0  # off centre: some experts are everyone's

    def imbalance() -> float:
        load = load_of(router(x)[0][None], 8)
        return float(load.max() / load.float().mean())

    before = imbalance()
    for _ in range(60):
        router.bias = updated_bias(router.bias, load_of(router(x)[0][None], 8), 0.02)
    assert before > 2.0
    assert imbalance() < 1.3


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_auxiliary_loss_is_that_of_the_whole_batch_however_it_is_spread(scores: str) -> None:
    """Four ranks' gradients, averaged, are autograd's of one rank with everyone's tokens; one rank has none of them."""
    torch.manual_seed(0)
    routing = RouterConfig(8, 3, scores=scores, balance=0.7)
    router = Router(6, routing).double()
    x = torch.randn(40, 6, dtype=torch.float64)
    index, weight, shares = router(x)
    load = load_of(index[None], 8)
    aux = 0.7 * 8 * (load / 120 * shares.mean(0)).sum()
    torch.testing.assert_close(0.7 * (loss_slope(load, 3) * shares.sum(0)).sum(), aux)
    (weight.square().mean() + aux).mul(0.25).backward()
    expected, router.weight.grad = router.weight.grad, None

    parts = x.split([12, 0, 27, 1])
    everyone = torch.cat([Tally()(router(part)[0], router(part)[2])[0] for part in parts])
    for part in parts:
        balance = AuxiliaryLoss(routing)
        balance.scale = 0.25
        index, weight, shares = router(part)
        # The main loss is a mean over tokens: its part of four ranks' average.
        balance(weight, Tally()(index, shares)[1], everyone).square().sum().mul(0.25 * 4 / 120).backward()
        torch.testing.assert_close(balance.total, aux.detach())
    assert router.weight.grad is not None
    torch.testing.assert_close(router.weight.grad / 4, expected)


def test_even_loads_have_an_auxiliary_loss_of_one() -> None:
    assert float((loss_slope(torch.tensor([5, 5, 5, 5]), 4) * torch.full((5, 4), 0.25)).sum()) == 1.0
    assert not loss_slope(torch.zeros(4), 2).any()


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60)
def test_capacity_keeps_the_first_or_the_largest_of_every_expert(data: st.DataObject) -> None:
    tokens, k, slots = (data.draw(st.integers(1, n)) for n in (12, 3, 6))
    index = torch.tensor([data.draw(st.permutations(range(4)))[:k] for _ in range(tokens)])
    weight = torch.tensor([[data.draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in range(k)] for _ in range(tokens)])
    keys = {"position": lambda t, w: t, "probs": lambda t, w: (-w, t)}
    for drop, key in keys.items():
        stay = kept_choices(index, weight, slots, drop)
        for expert in range(4):
            wanting = [(t, float(weight[t, c])) for t, c in (index == expert).nonzero().tolist()]
            best = {t for t, w in sorted(wanting, key=lambda pair: key(*pair))[:slots]}
            assert {t for t, c in (index == expert).nonzero().tolist() if stay[t, c]} == best


def test_slots_are_counted_exactly_and_bad_capacities_refused() -> None:
    assert ExpertCapacity(1.1).slots(100, 1, 10) == 11  # 1.1 * 10 is more than 11 in floating point
    assert ExpertCapacity(1.25).slots(64, 2, 16) == 10
    assert ExpertCapacity(0.001).slots(64, 2, 16) == 1
    assert ExpertCapacity(100.0).slots(64, 2, 16) == 64
    for factor in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(RuntimeFault, match="capacity"):
            ExpertCapacity(factor)
    with pytest.raises(RuntimeFault, match="possible: probs, position"):
        ExpertCapacity(1.0, "last")


def plain_experts(experts: Experts, rows: Tensor, counts: list[int]) -> Tensor:
    parts = []
    for e, part in enumerate(rows.split(counts)):
        gate, up = (part @ experts.gate_up[e]).chunk(2, -1)
        parts.append((functional.silu(gate) * up) @ experts.down[e])
    return torch.cat(parts)


@pytest.mark.parametrize(("counts", "padded"), [([3, 0, 5, 2], False), ([0, 0, 0, 0], False), ([3, 3, 3, 3], True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_expert_gradients_at_once_deferred_and_plain(counts: list[int], padded: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    at_once = Experts(4, 6, 5).to(dtype)
    deferred, plain = (copy.deepcopy(at_once) for _ in range(2))
    split = SplitBackward()
    row_counts = None if padded else counts
    leaves: list[list[Tensor]] = [[], [], []]
    for m, rows in enumerate(torch.randn(3, sum(counts), 6, dtype=dtype)):
        for kind, call in enumerate((at_once, deferred, None)):
            leaf = rows.clone().requires_grad_()
            leaves[kind].append(leaf)
            output = call(leaf, row_counts) if call else plain_experts(plain, leaf, counts)
            loss = output.sin().sum()
            if call is deferred:
                split.backward(m, [get_gradient_edge(loss)], [torch.ones_like(loss)])
            else:
                loss.backward()
        assert len(split.pending[m].products) == 2
    assert deferred.gate_up.grad is None
    for m in range(3):
        split.weight(m)
    assert torch.equal(deferred.gate_up.grad, at_once.gate_up.grad)  # type: ignore[arg-type]
    assert torch.equal(deferred.down.grad, at_once.down.grad)  # type: ignore[arg-type]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves[0], leaves[1], strict=True))  # type: ignore[arg-type]
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(at_once.get_parameter(name).grad, parameter.grad, **tolerance)
    for a, b in zip(leaves[0], leaves[2], strict=True):
        torch.testing.assert_close(a.grad, b.grad, **tolerance)


def test_frozen_experts_make_no_work_and_wrong_counts_are_refused() -> None:
    experts = Experts(2, 4, 3)
    experts.down.requires_grad_(False)
    split = SplitBackward()
    loss = experts(torch.randn(5, 4), [2, 3]).sum()
    split.backward(0, [get_gradient_edge(loss)], [torch.ones_like(loss)])
    assert len(split.pending[0].products) == 1
    split.weight(0)
    assert experts.down.grad is None
    assert experts.gate_up.grad is not None
    with pytest.raises(RuntimeFault, match="5 rows for 2 experts"):
        experts(torch.randn(5, 4), [2, 2])
    with pytest.raises(RuntimeFault, match="5 padded rows for 2 experts"):
        experts(torch.randn(5, 4), None)


@pytest.mark.parametrize(
    "routing",
    [
        ROUTING,
        RouterConfig(8, 2),
        RouterConfig(4, 4, balance=1.0),
        RouterConfig(5, 1, scores="sigmoid", normalise=False),
    ],
)
@pytest.mark.parametrize("capacity", [None, ExpertCapacity(0.75, "position"), ExpertCapacity(1.0), ExpertCapacity(9.0)])
def test_a_layer_alone_is_plain_autograd(routing: RouterConfig, capacity: ExpertCapacity | None) -> None:
    layer, reference = small_layer(routing), small_layer(routing)
    layer.attach(ExpertGroup.solo(), capacity=capacity)
    set_loss_scale(layer, 0.5)
    (x,), (y,) = tokens(1, 12), tokens(1, 12)
    x.requires_grad_()
    y.requires_grad_()
    output = layer(x.view(3, 4, WIDTH))
    (expected,), loss = plain(reference, [y], capacity)
    torch.testing.assert_close(output.flatten(0, 1), expected)
    (output.sin().mean() * 0.5).backward()
    ((expected.sin().mean() + loss) * 0.5).backward()
    torch.testing.assert_close(x.grad, y.grad)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(layer.get_parameter(name).grad, parameter.grad, msg=name)
    statistics = layer.statistics
    assert statistics.choices == 12 * routing.top
    assert statistics.rows == statistics.choices - statistics.dropped
    if routing.balance:
        torch.testing.assert_close(statistics.balance_loss, float(loss.detach()))
    if capacity is None:
        assert statistics.padded_rows == statistics.rows
    else:
        assert statistics.padded_rows == routing.experts * capacity.slots(12, routing.top, routing.experts)
        assert (statistics.dropped > 0) == (
            capacity.factor <= 1.0 and (routing.top < routing.experts or capacity.factor < 1)
        )


@pytest.mark.processes
@pytest.mark.parametrize("capacity", [None, [1.0, "probs"], [0.5, "position"]])
def test_sharded_layers_agree_whatever_the_method(capacity: list[Any] | None) -> None:
    results = pool(4).run("runtime.moe.moe_cases:sharded_layer", per_node=2, capacity=capacity)
    for result in results:
        assert result["bitwise"]
        assert result["error"] < 1e-13
        assert result["choices"] == 4 * 10 * 3
        assert (result["dropped"] > 0) == (capacity is not None)
        assert result["padded_rows"] == (4 * 2 * math.ceil(capacity[0] * 30 / 8) if capacity else result["rows"])
    assert sum(result["rows"] for result in results) == 120 - results[0]["dropped"]


@pytest.mark.processes
def test_ranks_with_other_numbers_of_tokens_have_the_loss_of_all_of_them() -> None:
    for errors in pool(4).run("runtime.moe.moe_cases:uneven"):
        assert max(errors) < 1e-13


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, MoELayer)


@pytest.mark.parametrize("method", METHODS)
def test_a_trace_shows_the_exchanges_in_their_order(method: str) -> None:
    layer = small_layer()
    layer.attach(ExpertGroup.solo(), method)  # type: ignore[arg-type]
    traced = fx.GraphModule(layer, _Tracer().trace(layer))
    x = tokens(1)[0]
    assert torch.equal(traced(x), layer(x))
    modules = [layer.get_submodule(str(n.target)) for n in traced.graph.nodes if n.op == "call_module"]
    shown = [(m.label, getattr(m, "hop", "")) for m in modules if isinstance(m, Exchange)]
    hops = ["flat"] if method == "flat" else ["rail", "node"]
    assert shown == [("routing", ""), *(("dispatch", h) for h in hops), *(("combine", h) for h in hops[::-1])]


def test_shards_keep_names_and_marks_and_make_the_whole_again() -> None:
    whole = small_layer()
    state = whole.state_dict()
    ranks = []
    for group in in_process_expert_groups(4, 2):
        layer = small_layer()
        shard_experts(layer, group, "hierarchical")
        ranks.append(layer)
    assert list(ranks[2].state_dict()) == list(state)
    assert torch.equal(ranks[2].experts.down, whole.experts.down[4:6])
    joined = join_shards(ranks[0], [layer.state_dict() for layer in ranks])
    assert all(torch.equal(joined[name], value) for name, value in state.items())
    zeroed = {name: torch.zeros_like(value) for name, value in state.items()}
    ranks[2].load_state_dict(local_state(ranks[2], zeroed | {"experts.down": state["experts.down"]}))
    assert torch.equal(ranks[2].experts.down, whole.experts.down[4:6])
    assert not ranks[2].experts.gate_up.any()

    copied = copy.deepcopy(torch.nn.Sequential(whole, ranks[1].experts))
    assert [name for name, _ in parameters_of_experts(copied)] == ["1.gate_up", "1.down"]
    assert [name for name, p in copied.named_parameters() if is_expert(p)] == ["1.gate_up", "1.down"]
    with pytest.raises(RuntimeFault, match="spread over ranks already"):
        shard_experts(ranks[1], ExpertGroup.solo())
    with pytest.raises(RuntimeFault, match="8 experts on 3 ranks"):
        shard_experts(small_layer(), in_process_expert_groups(3, 1)[0])
    with pytest.raises(RuntimeFault, match=r"rank 1 of 4 holds experts 0 to 7 of 8\n.*shard_experts"):
        small_layer().attach(in_process_expert_groups(4, 2)[1])
    with pytest.raises(RuntimeFault, match="method `ring`"):
        small_layer().attach(ExpertGroup.solo(), "ring")  # type: ignore[arg-type]
