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
    present = torch.ones(len(parameters), dtype=first.dtype, device=first.device)
    if absent := [position for position, p in enumerate(parameters) if p.grad is None]:
        present[absent] = 0
    return torch.cat([*[(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters], present])


def unflattened(
    parameters: Sequence[nn.Parameter], flat: Tensor, own: Sequence[bool] = ()
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """(parameter, gradient) of each parameter that has a gradient, which has the shape of the parameter.

    flat: [elements + parameters] result of `flattened`, of one rank or summed. own: [parameters] whether this rank's
    part of a sum has a gradient. The host reads the marks of others only where some are missing.
    """
    *parts, present = torch.split(flat, [*(p.numel() for p in parameters), len(parameters)])
    marks = own if own and all(own) else present.tolist()
    for parameter, part, has in zip(parameters, parts, marks, strict=True):
        if has:
            yield parameter, part.view_as(parameter)
