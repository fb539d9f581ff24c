"""What the tests of exported orders run on every rank: torch's own pipeline runtime, fed with a CSV of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from schedc.compiler import compile as compile_schedule
from schedc.interchange.torch_lowered import to_lowered_csv
from schedc_runtime import Cut, Pipeline

_WIDTH = 8
_ROWS = 3
"""Rows of one microbatch."""


def stage_module(index: int) -> nn.Module:
    """The same weights for a stage on every rank and in the reference, in float64."""
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, _WIDTH)).double()


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (_ROWS * microbatches, _WIDTH)
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
    step(modules, path, level, home, batch(microbatches), rank)
    return gradients(modules)


def step(
    modules: dict[int, nn.Module], path: str, level: str, home: list[int], data: tuple[Tensor, Tensor], rank: int
) -> None:
    """One step of torch's runtime on this rank's ``modules``, with batch and targets in as many microbatches as rows
    go by three."""
    inputs, targets = data
    stages = [PipelineStage(module, index, len(home), torch.device("cpu")) for index, module in modules.items()]
    schedule = _PipelineScheduleRuntime(stages, len(inputs) // _ROWS, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(path, format=level)
    schedule.step(*([inputs] if home[0] == rank else []), target=targets if home[-1] == rank else None)


def unlike_ours(rank: int, world_size: int, names: list[str], sizes: dict[str, int], folder: str) -> dict[str, Any]:
    """By schedule: parameters whose gradients differ between torch's runtime, fed with the lowered CSV, and ours, on
    the stages of this rank, and how many there are. In float32, with every layer that W treats in its own way."""
    differing: dict[str, Any] = {}
    for name in names:
        program = compile_schedule(name, **sizes)
        path = Path(folder) / f"{name}.{rank}.csv"
        path.write_text(to_lowered_csv(program))
        home = program.placement.rank_of_stage[0].tolist()
        data = tuple(x.float() for x in batch(program.microbatches))
        everything = nn.Sequential(*[_normed(index) for index in range(program.stages)])
        theirs = {index: _normed(index) for index, holder in enumerate(home) if holder == rank}
        step(theirs, str(path), "compute_comms", home, data, rank)
        points = [str(index) for index in range(1, program.stages)]
        pipe = Pipeline(
            everything, program, loss_fn=nn.functional.mse_loss, cut=Cut(blocks="", split_points=points), timeout=30
        )
        pipe.step(*data)
        ours = {name: parameter.grad.flatten().tolist() for name, parameter in pipe.named_parameters()}
        expected = gradients(theirs)
        assert ours.keys() == expected.keys()
        differing[name] = sorted(key for key, value in ours.items() if value != expected[key]), len(ours)
        pipe.close()
    return differing


def _normed(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, _WIDTH))
