"""Models whose routing is skewed on purpose, and steps of them with hot experts, in one process or in many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from expert_cases import compiled
from runtime_cases import next_token_loss, tokens
from segmented_cases import small_moe
from torch import Tensor

from schedc_runtime import Pipeline
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.moe.router import Routing

ROWS = 4
"""Of a microbatch, 6 tokens each."""


def skewed(strength: float = 1.0, experts: int = 8, top: int = 2, seed: int = 0) -> Any:
    """Four blocks, the first dense, whose routers prefer some experts: all tokens the same ones, the stronger it is."""
    routing = Routing(experts=experts, k=top, scores="sigmoid", biased=True, balance=1e-2)
    model = small_moe(moe_blocks=3, dense_blocks=1, routing=routing, expert_inner=2)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in moe_layers(model):
        assert layer.router.bias is not None
        layer.router.bias.copy_(strength * torch.randn(experts, generator=generator, dtype=torch.float64))
    return model


def pipeline(schedule: str, sizes: dict[str, int], lines: str, model: Any, here: bool = True) -> Pipeline:
    """All ranks here, cells one after the other; or this process' rank, as the plan has it."""
    lines = lines.replace("overlap auto", "overlap off") if here else lines
    program = compiled(schedule, sizes, lines)
    return Pipeline(model, program, loss_fn=next_token_loss, in_process=here, timeout=30)


def step(pipe: Pipeline, seed: int = 1) -> Tensor:
    """Loss of one step; gradients add up."""
    replicas = pipe.mesh.replicas
    batch, targets = tokens(ROWS * pipe.program.microbatches * replicas, seed=seed)
    if not pipe._network.in_process:
        batch, targets = (part.chunk(replicas)[pipe.replica] for part in (batch, targets))
    return pipe.step(batch, targets)


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    """By name, with the place that holds them."""
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
    found = [
        layer.statistics for held in pipe._stages.values() for s in held.values() for _, layer in moe_layers(s.module)
    ]
    return {name: sum(getattr(statistics, name) for statistics in found) for name in names}


def parity(rank: int, world_size: int, cases: Sequence[tuple[str, dict[str, int], str]]) -> list[Any]:
    """Per case: names of what differs here from all ranks in one process, after two steps; and what was lent here."""
    found = []
    for case in cases:
        pipe = pipeline(*case, skewed(), here=False)
        expected = pipeline(*case, skewed())
        losses = [torch.equal(step(pipe, seed), step(expected, seed)) for seed in (1, 2)]
        mine, wanted = gradients(pipe), gradients(expected)
        wrong = [name for name, grad in mine.items() if not torch.equal(grad, wanted[name])]
        found.append([losses, wrong, lent(pipe)])
        pipe.close()
    return found
