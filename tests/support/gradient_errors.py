"""Compares the gradients that a rank of a pipeline holds with those of one process."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from schedc_runtime import Mesh, Pipeline


def own(tensor: Tensor, parameter: nn.Parameter, mesh: Mesh, peer: int) -> Tensor:
    """What a rank holds of a whole tensor [...] of a parameter. peer: number of the rank, of `Mesh.peer`."""
    if getattr(parameter, "expert_parallel", False):
        return tensor.chunk(mesh.experts)[peer % mesh.experts]
    part = getattr(parameter, "tensor_parallel", None)
    if part is None:
        return tensor
    dim, size, rank = part
    return tensor.chunk(size, dim)[rank]


def largest_of(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """By path of a module: its largest gradient."""
    largest: dict[str, float] = {}
    for name, grad in gradients.items():
        owner = name.rpartition(".")[0]
        largest[owner] = max(largest.get(owner, 0.0), grad.abs().max().item())
    return largest


def rounding_of(alone: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of the gradients of one process [...], relative to the largest gradient of its module."""
    largest = largest_of(expected)
    return max(
        (alone[name] - grad).abs().max().item() / (largest[name.rpartition(".")[0]] or 1.0)
        for name, grad in expected.items()
    )


def errors_of(pipe: Pipeline, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """By name: the largest difference of a gradient here, relative to the largest gradient of its module.

    What is no number is infinite, as `max` may leave it out.
    """
    largest = largest_of(expected)
    peer, errors = pipe.mesh.peer(pipe.places[0]), {}
    for name, parameter in pipe.named_parameters():
        if name in expected:
            wanted = own(expected[name], parameter, pipe.mesh, peer)
            got = torch.zeros_like(wanted) if parameter.grad is None else parameter.grad
            error = (got - wanted).abs().max().item() / (largest[name.rpartition(".")[0]] or 1.0)
            errors[name] = math.inf if math.isnan(error) else error
    return errors


def error_of(pipe: Pipeline, expected: Mapping[str, Tensor]) -> float:
    """The largest of `errors_of`."""
    return max(errors_of(pipe, expected).values())
