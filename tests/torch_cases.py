"""What the tests of exported orders run on every rank: torch's own pipeline runtime, fed with a CSV of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

_WIDTH = 8


def stage_module(index: int) -> nn.Module:
    """The same weights for a stage on every rank and in the reference, in float64."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, _WIDTH)).double()


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (3 * microbatches, _WIDTH)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def gradients(modules: dict[int, nn.Module]) -> dict[str, list[float]]:
    return {
        f"{index}.{name}": parameter.grad.flatten().tolist()
        for index, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def plain(stages: int, microbatches: int) -> dict[str, list[float]]:
    """The gradients of the mean loss by autograd alone, microbatch by microbatch, in ascending order."""
    modules = {index: stage_module(index) for index in range(stages)}
    inputs, targets = batch(microbatches)
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        for module in modules.values():
            x = module(x)
        nn.functional.mse_loss(x, y).backward()
    for module in modules.values():
        for parameter in module.parameters():
            parameter.grad.div_(microbatches)
    return gradients(modules)


def run_csv(rank: int, world_size: int, path: str, level: str, home: list[int], microbatches: int) -> dict[str, Any]:
    """One step of torch's runtime with the order of a CSV; the gradients of this rank's stages.

    home: the rank of each stage.
    """
    modules = {index: stage_module(index) for index, holder in enumerate(home) if holder == rank}
    stages = [PipelineStage(module, index, len(home), torch.device("cpu")) for index, module in modules.items()]
    schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(path, format=level)
    inputs, targets = batch(microbatches)
    schedule.step(*([inputs] if home[0] == rank else []), target=targets if home[-1] == rank else None)
    return gradients(modules)
