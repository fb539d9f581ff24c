"""What one rank changes alone before a step, on every rank of a pool of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import schedc
from schedc_runtime import Mesh, Pipeline
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.layer import MoELayer, moe_layers
from schedc_runtime.moe.router import Router, RouterConfig

WIDTH = 4


class Model(nn.Module):
    """A dense layer, and experts whose router has a bias; the bias stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        routing = RouterConfig(4, 2, scores="sigmoid", biased=True, bias_rate=0.0)
        self.factor = 1.0
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), MoELayer(Router(WIDTH, routing), Experts(4, WIDTH, 2))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.factor


@dataclass
class Change:
    """What a rank does alone. undo: afterwards. around: the context of its step."""

    do: Callable[[Pipeline, nn.Module], Any] = lambda pipe, model: None
    undo: Callable[[Pipeline, nn.Module], Any] = lambda pipe, model: None
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


def _frozen(frozen: bool) -> Callable[[Pipeline, nn.Module], Any]:
    def set_all(pipe: Pipeline, _model: nn.Module) -> None:
        next(pipe.parameters()).requires_grad_(not frozen)

    return set_all


def _updates(more: int) -> Callable[[Pipeline, nn.Module], Any]:
    def add(pipe: Pipeline, _model: nn.Module) -> None:
        if more > 0:
            pipe.update_biases()
            return
        pipe._runner.facts.updates += more
        for module in pipe.modules:
            for _, layer in moe_layers(module):
                layer.updates += more

    return add


CHANGES = {
    "frozen": Change(_frozen(True), _frozen(False)),
    "eval": Change(lambda pipe, model: model.eval(), lambda pipe, model: model.train()),
    "train": Change(lambda pipe, model: pipe.train(False), lambda pipe, model: pipe.train()),
    "one module": Change(lambda pipe, model: model.layers.eval(), lambda pipe, model: model.train()),
    "autocast": Change(around=lambda: torch.autocast("cpu", torch.bfloat16)),
    "no_grad": Change(around=torch.no_grad),
    "update_biases": Change(_updates(1), _updates(-1)),
    "reads": Change(
        lambda pipe, model: setattr(model, "factor", 2.0), lambda pipe, model: setattr(model, "factor", 1.0)
    ),
}


def alone(rank: int, world_size: int, odd: int) -> dict[str, list[str]]:
    """What a step raises on each rank, by what rank ``odd`` does alone; a step without it succeeds in between."""
    model, pipe = _pipeline(Mesh(2, experts=2))
    outcomes = {}
    for name, change in CHANGES.items():
        if rank == odd:
            change.do(pipe, model)
        with change.around() if rank == odd else nullcontext():
            outcomes[name] = _outcome(lambda: pipe.step(*_batch()))
        if rank == odd:
            change.undo(pipe, model)
        pipe.step(*_batch())
        pipe.evaluate(*_batch())
        pipe.update_biases()
    pipe.close()
    return outcomes


def update_alone(rank: int, world_size: int, odd: int) -> list[str]:
    """Where ranks exchange loads, an update that one rank calls meets the step of the others."""
    _, pipe = _pipeline(Mesh(2, data=2))
    started = time.monotonic()
    outcome = _outcome(pipe.update_biases if rank == odd else lambda: pipe.step(*_batch()))
    pipe.step(*_batch())
    pipe.update_biases()
    pipe.step(*_batch())
    pipe.close()
    return [*outcome, "soon" if time.monotonic() - started < 25 else "late"]


def _pipeline(mesh: Mesh) -> tuple[nn.Module, Pipeline]:
    model, program = Model(), schedc.compile("1f1b", P=2, M=2)
    loss_fn = nn.functional.mse_loss
    return model, Pipeline(model, program, loss_fn=loss_fn, mesh=mesh, timeout=50, example=_batch()[0])


def _batch() -> tuple[Tensor, Tensor]:
    return torch.ones(4, WIDTH), torch.zeros(4, WIDTH)


def _outcome(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []
