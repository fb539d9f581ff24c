"""Lays gradients out in one tensor per dtype, with a mark for every parameter that has a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn


def by_dtype(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, ...]]:
    """The trainable ``parameters`` in groups of one dtype, in order: the same groups on every rank."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(parameter.dtype, []).append(parameter)
    return [tuple(group) for group in groups.values()]


def flattened(parameters: Sequence[nn.Parameter]) -> Tensor:
    """[elements + parameters] the gradients in a row, then a mark per parameter: 1 with a gradient, 0 without.

    A parameter without a gradient, such as an expert without tokens, has zeros. The marks tell a parameter without a
    gradient on all ranks, which keeps none.
    """
    first = parameters[0]
    present = torch.tensor([p.grad is not None for p in parameters], dtype=first.dtype, device=first.device)
    return torch.cat([*[(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters], present])


def unflattened(parameters: Sequence[nn.Parameter], flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """(parameter, gradient) of each parameter that has a gradient, which has the shape of the parameter.

    flat: [elements + parameters] result of `flattened`, of one rank or summed.
    """
    *parts, present = torch.split(flat, [*(p.numel() for p in parameters), len(parameters)])
    for parameter, part, has in zip(parameters, parts, present.tolist(), strict=True):
        if has:
            yield parameter, part.view_as(parameter)
