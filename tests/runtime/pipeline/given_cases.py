"""What one rank is given or holds otherwise than others, on every rank of a pool of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Loss, Mesh, Pipeline
from schedc_runtime.errors import RanksDisagree
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.router import Router, RouterConfig

WIDTH = 4
Outcome = str | None
"""What a call has refused; None if it succeeded."""


class Model(nn.Module):
    """Dense layers, or layers with experts."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        routed = [MoELayer(Router(WIDTH, RouterConfig(4, 2)), Experts(4, WIDTH, 2)) for _ in range(2 * experts)]
        self.layers = nn.ModuleList(routed or layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def skipping(rank: int, world_size: int, data: int, later: bool = False) -> tuple[list[Outcome], list[Outcome]]:
    """The last process skips its third batch: five steps, and two with equal batches. later: as on a GPU."""
    pipe = _pipeline(Mesh(2, data=data))
    pipe._runner._batches._later = later
    loader = [batch_of(8 * pipe.replica + number) for number in range(7)]
    if rank == world_size - 1:
        del loader[2]
    told = [_outcome(pipe.step, *given) for given in loader[:5]]
    mended = [_outcome(pipe.step, *batch_of(8 * pipe.replica)) for _ in range(2)]
    pipe.close()
    return told, mended


def parts(rank: int, world_size: int) -> tuple[list[Outcome], int]:
    """Rank 1 is given less or something else; the rounds in which ranks meet in a plain step."""
    pipe = _pipeline(Mesh(2), example={"x": torch.ones(2, WIDTH)})
    (x, targets), (other, _) = batch_of(0), batch_of(1)
    first = rank == 0
    given: list[Any] = [
        ({"x": x}, None) if first else (None, targets),
        ({"x": x.mT.contiguous().mT if first else x}, targets),  # equal, though it lies otherwise
        ({"x": x if first else other}, targets),
        ({"x": x}, targets if first else targets + 1e-6),
    ]
    told = [_outcome(pipe.step, *each) for each in given]
    told.append(_outcome(pipe.evaluate, {"x": x if first else other}, targets))
    for _ in range(2):
        pipe.step({"x": x}, targets)
    before = pipe.control._round
    pipe.step({"x": x}, targets)
    pipe.clip_grad_norm_(1.0)
    met = pipe.control._round - before
    pipe.close()
    return told, met


def copies(rank: int, world_size: int, schedule: str, mesh: dict[str, int]) -> list[list[Outcome]]:
    """The last process alone scales a parameter, then loads a state. The refusals of steps, and a mended step."""
    experts = mesh.get("experts", 1) > 1
    pipe = _pipeline(Mesh(**mesh), schedule, Model(experts), compare_copies=3)
    state = {name: value.clone() for name, value in Model(experts).state_dict().items()}
    outcomes = []
    for change in (_scale, lambda pipe: pipe.load_state_dict({name: value * 1.01 for name, value in state.items()})):
        pipe.load_state_dict(state)
        pipe.step(*batch_of(pipe.replica))
        if rank == world_size - 1:
            change(pipe)
        pipe.steps = 1
        outcomes.append([_outcome(pipe.step, *batch_of(pipe.replica)) for _ in range(3)])
        pipe.load_state_dict(state)
        outcomes.append([_outcome(pipe.step, *batch_of(pipe.replica))])
        pipe.steps = 3
    pipe.close()
    return outcomes


def counts(rank: int, world_size: int) -> tuple[list[list[float]], int]:
    """Each replica counts other targets at each step. Loss and count of the steps; rounds of the last one."""

    def loss_fn(output: Tensor, targets: Tensor) -> Loss:
        counted = targets > 0
        return Loss((((output - targets) ** 2) * counted).sum(), counted.sum())

    program = schedc.compile("1f1b", P=1, M=4)
    pipe = Pipeline(Model(), program, loss_fn=loss_fn, count_fn=lambda y: (y > 0).sum(), mesh=Mesh(1, data=world_size),
                    timeout=20, example=torch.ones(2, WIDTH))  # fmt: skip
    losses, before = list[list[float]](), 0
    for number in range(3):
        x, targets = batch_of(0)
        targets[: number + 2 * rank] = -1
        before = pipe.control._round
        loss = pipe.step(x, targets)
        losses.append([float(loss), pipe.result.count if pipe.result else 0.0])
    met = pipe.control._round - before
    pipe.close()
    return losses, met


def _scale(pipe: Pipeline) -> None:
    with torch.no_grad():
        list(pipe.parameters())[-1].mul_(1.01)


def _pipeline(mesh: Mesh, schedule: str = "1f1b", model: nn.Module | None = None, **settings: Any) -> Pipeline:
    program = schedc.compile(schedule, P=mesh.pipeline, M=4)
    settings.setdefault("example", torch.ones(2, WIDTH))
    return Pipeline(model or Model(), program, loss_fn=nn.functional.mse_loss, mesh=mesh, timeout=20, **settings)


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def _outcome(call: Callable[..., Any], *given: Any) -> Outcome:
    try:
        call(*given)
    except RanksDisagree as error:
        return error.message
    return None
