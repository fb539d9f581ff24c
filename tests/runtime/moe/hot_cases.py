"""Models whose routing is skewed on purpose, and steps of them with hot experts, in one process or in many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedc_runtime import Pipeline
from schedc_runtime.moe.even_rows import EvenRows
from schedc_runtime.moe.hot_choice import HotPolicy
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.moe.shards import shard_experts
from schedc_runtime.ranks.expert_group import ExpertGroup
from support.expert_cases import compiled
from support.reference_runs import spread
from support.runtime_cases import next_token_loss, tokens
from support.segmented_cases import small_moe

ROWS = 4
"""Rows of a microbatch, 6 tokens each."""


def skewed(
    strength: float = 1.0, seed: int = 0, inner: int = 2, moe_blocks: int = 2, experts: int = 8, top: int = 2
) -> Any:
    """A dense block and some with experts, whose routers prefer some: all tokens the same ones, the stronger it is."""
    routing = RouterConfig(experts=experts, top=top, scores="sigmoid", biased=True, balance=1e-2)
    model = small_moe(moe_blocks=moe_blocks, dense_blocks=1, routing=routing, expert_inner=inner)
    for number, (_, layer) in enumerate(moe_layers(model)):
        _prefer(layer, strength, seed + number)
    return model


def _prefer(layer: MoELayer, strength: float, seed: int) -> None:
    assert layer.router.bias is not None
    generator = torch.Generator().manual_seed(seed)
    layer.router.bias.copy_(strength * torch.randn(len(layer.router.bias), generator=generator, dtype=torch.float64))


def layers_of(pipe: Pipeline) -> list[MoELayer]:
    """The layers of all coordinates."""
    return [layer for held in pipe._stages.values() for s in held.values() for _, layer in moe_layers(s.module)]


def set_strength(pipe: Pipeline, strength: float) -> None:
    """Bias all layers of all places alike."""
    for layer in layers_of(pipe):
        _prefer(layer, strength, seed=0)


def pipeline(schedule: str, sizes: dict[str, int], lines: str, model: Any, here: bool = True) -> Pipeline:
    """All ranks here, cells one after the other; or this process' rank, as the plan has it."""
    off = "" if "slices" in lines else "overlap off"  # slices run in cells, on all ranks in turns
    lines = lines.replace("overlap auto", off) if here else lines
    program = compiled(schedule, sizes, lines, f"{len(model.blocks)} dense 1")
    batch, _ = tokens(ROWS * program.microbatches)
    return Pipeline(model, program, loss_fn=next_token_loss, in_process=here, timeout=30, example=batch)


def step(pipe: Pipeline, seed: int = 1) -> Tensor:
    """Loss of one step; gradients add up."""
    replicas = pipe.mesh.replicas
    batch, targets = tokens(ROWS * pipe.program.microbatches * replicas, seed=seed)
    if not pipe._network.in_process:
        batch, targets = (part.chunk(replicas)[pipe.replica] for part in (batch, targets))
    return pipe.step(batch, targets)


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    """By name, with the place of the holder."""
    return {
        f"{place} {name}": parameter.grad.clone()
        for place, held in pipe._stages.items()
        for stage in held.values()
        for name, parameter in stage.module.named_parameters()
        if parameter.grad is not None
    }


def lent(pipe: Pipeline) -> dict[str, int]:
    """What all layers and ranks counted, summed."""
    names = ("hot_experts", "hot_rows", "hot_bytes_sent", "hot_bytes_saved")
    counted = [layer.statistics for layer in layers_of(pipe)]
    return {name: sum(getattr(statistics, name) for statistics in counted) for name in names}


def exchanged_bytes(pipe: Pipeline) -> int:
    """What all ranks sent to others so far, over the communicator of their whole group."""
    groups = {id(layer.routing.group.expert): layer.routing.group.expert for layer in layers_of(pipe)}
    return sum(sum(group.sent) - group.sent[group.rank] for group in groups.values())


def module(rank: int, world_size: int, frozen: bool, even: bool = False) -> tuple[float, int, bool]:
    """A layer under plain autograd with and without copies: the largest difference of anything, rows that stayed, and
    whether experts have gradients. Copies are those of hot experts, or make rows ``even``: one rank then has none."""
    assert dist.group.WORLD is not None
    group = ExpertGroup.of([range(dist.get_world_size())], 2, 30.0)
    results: list[list[Tensor]] = []
    for copies in ({}, {"even": EvenRows()} if even else {"hot": HotPolicy(2, 1.0, True, 1)}):
        (_, layer), *_ = moe_layers(skewed(2.0))
        shard_experts(layer, group, "flat" if even else "hierarchical", **copies)
        layer.experts.requires_grad_(not frozen)
        x = torch.randn(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        y = layer(x)
        y.sin().sum().backward()
        grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        results.append([y.detach(), *(grad for grad in grads if grad is not None)])
    error = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    return error, layer.statistics.hot_rows, layer.experts.down.grad is not None


def _model_of(case: tuple[str, dict[str, int], str]) -> Any:
    """A block for each of two stages on every rank, and three at least."""
    return skewed(moe_blocks=max(2, 2 * case[1]["P"] - 1))


def parity(rank: int, world_size: int, cases: Sequence[tuple[str, dict[str, int], str]]) -> list[Any]:
    """Per case: names of what differs here from all ranks in one process, after two steps; and what was lent here."""
    outcomes = []
    for case, (expected, wanted) in zip(cases, spread(_reference, cases), strict=True):
        pipe = pipeline(*case, _model_of(case), here=False)
        losses = [torch.equal(step(pipe, seed), loss) for seed, loss in zip((1, 2), expected, strict=True)]
        wrong = [name for name, grad in gradients(pipe).items() if not torch.equal(grad, wanted[name])]
        outcomes.append([losses, wrong, lent(pipe)])
        pipe.close()
    return outcomes


def _reference(case: tuple[str, dict[str, int], str]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of two steps, and the gradients after them, of all ranks in one process."""
    pipe = pipeline(*case, _model_of(case))
    return [step(pipe, seed) for seed in (1, 2)], gradients(pipe)
