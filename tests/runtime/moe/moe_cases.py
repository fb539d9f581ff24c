"""What the tests of expert layers run on every rank of a pool of processes, and the layer by plain autograd."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from schedc_runtime.data_parallel.gradient_sums import is_expert
from schedc_runtime.moe.balance import load_of, loss_slope
from schedc_runtime.moe.capacity import ExpertCapacity, kept_choices
from schedc_runtime.moe.counts import METHODS
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import GatedMLP, MoELayer
from schedc_runtime.moe.router import Router, RouterConfig
from schedc_runtime.moe.shards import full_state_dict, local_state, shard_experts
from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transport.collectives import TorchCommunicator
from support.moe_layers import set_loss_scale

torch.set_num_threads(1)
WIDTH = 6
ROUTING = RouterConfig(8, 3, scores="sigmoid", scale=1.5, groups=4, limit=3, biased=True, balance=0.3)


def small_layer(routing: RouterConfig = ROUTING) -> MoELayer:
    """The same weights on every rank, in float64; the biases are not zero."""
    torch.manual_seed(0)
    layer = MoELayer(Router(WIDTH, routing), Experts(routing.experts, WIDTH, 5), GatedMLP(WIDTH, 4)).double()
    if layer.router.bias is not None:
        layer.router.bias.copy_(torch.randn(routing.experts) * 0.1)
    return layer


def plain(layer: MoELayer, parts: list[Tensor], capacity: ExpertCapacity | None = None) -> tuple[list[Tensor], Tensor]:
    """([N, width] per rank, auxiliary loss) of a whole layer over the tokens of all ranks.

    Every expert takes every token, weighted with zero where the expert was not chosen or the choice was dropped.
    """
    routing = layer.router.routing
    outputs, indices, shares = [], [], []
    for x in parts:
        index, weight, share = layer.router(x)
        if capacity:
            slots = capacity.slots(*index.shape, routing.experts)
            weight = weight * kept_choices(index, weight, slots, capacity.drop)
        weights = torch.zeros(len(x), routing.experts, dtype=x.dtype).scatter(1, index, weight)
        total = layer.shared(x) if layer.shared else torch.zeros_like(x)
        for e in range(routing.experts):
            gate, up = (x @ layer.experts.gate_up[e]).chunk(2, -1)
            total = total + weights[:, e, None] * ((functional.silu(gate) * up) @ layer.experts.down[e])
        outputs.append(total)
        indices.append(index)
        shares.append(share)
    load = load_of(torch.cat(indices), routing.experts)
    slope = loss_slope(load, routing.top)
    return outputs, routing.balance * (slope * torch.cat(shares).sum(0)).sum()


def tokens(ranks: int, count: int = 10) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, WIDTH, dtype=torch.float64, generator=generator) for _ in range(ranks)]


COUNTS = (5, 0, 1, 8)
"""Tokens of each rank."""


def uneven(rank: int, world_size: int) -> list[float]:
    """Largest error in loss and gradients of four ranks with other numbers of tokens, against plain autograd.

    One error each for ranks that share experts by fours, with bounded buffers too, by twos and not at all.
    """
    assert dist.group.WORLD is not None
    replicas = TorchCommunicator(dist.group.WORLD, 30.0, "replicas")
    whole = small_layer()
    parts = [x[:count].requires_grad_() for x, count in zip(tokens(4), COUNTS, strict=True)]
    outputs, loss = plain(whole, parts)
    # What each rank gives is averaged over ranks.
    (sum(y.sin().sum() for y in outputs) / 4 + loss).backward()
    largest = []
    for experts, bound in ((4, None), (4, 4.0), (2, None), (1, None)):
        layer = small_layer()
        groups = [range(first, first + experts) for first in range(0, 4, experts)]
        group = ExpertGroup.of(groups, 1, 30.0) if experts > 1 else ExpertGroup.solo()
        most = None if bound is None else max(COUNTS)
        shard_experts(layer, group, "hierarchical", replicas=replicas, bound=bound, tokens=most)
        x = tokens(4)[rank][: COUNTS[rank]].requires_grad_()
        layer(x).sin().sum().backward()
        errors = [abs(layer.statistics.balance_loss - float(loss.detach())), _apart(x.grad, 4 * parts[rank].grad)]  # type: ignore[operator]
        for parameter, expected in zip(layer.parameters(), whole.parameters(), strict=True):
            grad, wanted = parameter.grad, expected.grad
            assert grad is not None
            assert wanted is not None
            if is_expert(parameter):
                full = torch.zeros_like(expected)
                full.narrow(0, layer.experts.first, len(grad)).copy_(grad)
                grad = full
            dist.all_reduce(grad)
            errors.append(_apart(grad / 4, wanted))
        largest.append(max(errors))
    return largest


def _apart(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().sum())


def sharded_layer(rank: int, world_size: int, per_node: int, capacity: list[Any] | None) -> dict[str, Any]:
    """All methods on this rank against each other, bitwise, and against plain autograd over all ranks' tokens."""
    assert dist.group.WORLD is not None
    group = ExpertGroup.of([range(dist.get_world_size())], per_node, 30.0)
    limit = ExpertCapacity(*capacity) if capacity else None
    results: dict[str, tuple[Tensor, ...]] = {}
    for method in METHODS:
        layer = small_layer()
        whole = {name: value.clone() for name, value in layer.state_dict().items()}
        shard_experts(layer, group, method, limit)
        set_loss_scale(layer, 0.5)
        x = tokens(world_size)[rank].requires_grad_()
        y = layer(x.view(2, 5, WIDTH)).view_as(x)
        (y.sin().mean() * 0.5).backward()
        results[method] = (y.detach(), x.grad, *(p.grad for p in layer.parameters()))  # type: ignore[assignment]
        joined = full_state_dict(copy.deepcopy(layer))
        assert all(torch.equal(joined[name], whole[name]) for name in whole)
        layer.load_state_dict(local_state(layer, whole))
        assert [name for name, p in layer.named_parameters() if is_expert(p)] == ["experts.gate_up", "experts.down"]
    bitwise = all(
        torch.equal(a, b) for method in METHODS for a, b in zip(results[method], results["flat"], strict=True)
    )
    whole_layer = small_layer()
    parts = [x.requires_grad_() for x in tokens(world_size)]
    outputs, loss = plain(whole_layer, parts, limit)
    (sum(y.sin().mean() for y in outputs) * 0.5 + 0.5 * world_size * loss).backward()
    experts = layer.experts
    expected = [outputs[rank].detach(), parts[rank].grad]
    mine = list(results["flat"][:2])
    for (name, parameter), grad in zip(whole_layer.named_parameters(), results["flat"][2:], strict=True):
        grad = grad.clone()
        if name.startswith("experts."):
            expected.append(parameter.grad[experts.first : experts.first + len(grad)])  # type: ignore[index]
        else:
            dist.all_reduce(grad)
            expected.append(parameter.grad)
        mine.append(grad)
    errors = [float((a - b).abs().max()) for a, b in zip(mine, expected, strict=True)]  # type: ignore[operator]
    statistics = layer.statistics
    return {
        "bitwise": bitwise,
        "error": max(errors),
        "choices": statistics.choices,
        "dropped": statistics.dropped,
        "rows": statistics.rows,
        "padded_rows": statistics.padded_rows,
    }
