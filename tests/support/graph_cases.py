"""Training with steps as graphs, beside the same training without: losses, gradients, state, counts of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from schedc_runtime import Cut, Pipeline
from support.capture_cases import data, pipeline

Between = Callable[[Pipeline, int], None]


def dropped(pipe: Pipeline, number: int) -> None:
    """What most trainers do."""
    for parameter in pipe.parameters():
        parameter.grad = None


def zeroed_or_dropped(pipe: Pipeline, number: int) -> None:
    """Gradients are dropped before some steps, zeroed before others, and before one they go on."""
    for parameter in pipe.parameters() if number != 4 else ():
        if number % 2 or parameter.grad is None:
            parameter.grad = None
        else:
            parameter.grad.zero_()


def trained(pipe: Pipeline, steps: int, between: Between = dropped) -> dict[str, Any]:
    """Losses, gradients of the last step, state and statistics after steps with data of their own."""
    values: dict[str, Any] = {}
    for number in range(steps):
        between(pipe, number)
        values[f"loss {number}"] = pipe.step(*data(pipe, number))
        values |= {f"gradient {number} {name}": _copy(each.grad) for name, each in pipe.named_parameters()}
        with torch.no_grad():
            for parameter in pipe.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        if number % 3 == 1:
            pipe.update_biases()  # counts of the last two steps add up
        if number % 3 == 1:
            pipe.update_biases()  # counts of the last two steps add up
    values |= {f"counts {n}": str(layer.statistics) for n, layer in enumerate(pipe._runner.layers)}
    return values | {name: each.clone() for name, each in pipe.full_state_dict().items()}


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def with_graphs(kind: str, schedule: str, sizes: dict[str, int] | None = None, **options: Any) -> Pipeline:
    """A pipeline whose steps become graphs."""
    cut = Cut(blocks=options.pop("blocks", None), graphs="step")
    return pipeline(kind, schedule, sizes, cut=cut, **options)


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names of what has other bits."""
    assert first.keys() == second.keys()
    return [
        name
        for name, value in first.items()
        if not (
            torch.equal(value, second[name])
            if isinstance(value, Tensor) and second[name] is not None
            else value == second[name]
        )
    ]
