"""Gradients as they travel between ranks: one tensor per dtype, with a mark for every parameter that has one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn


def by_dtype(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, ...]]:
    """The trainable ``parameters`` in groups of one dtype, in order: the same on every rank that holds them."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(parameter.dtype, []).append(parameter)
    return [tuple(group) for group in groups.values()]


def flattened(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The gradients in a row, zeros for a parameter without one (such as an expert that no token came to).

    Behind them a 1 for every parameter that has one and a 0 for one without: what has none on any rank keeps none.
    """
    first = parameters[0]
    present = torch.tensor([p.grad is not None for p in parameters], dtype=first.dtype, device=first.device)
    return torch.cat([*[(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters], present])


def unflattened(parameters: Sequence[nn.Parameter], flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The parts of what `flattened` laid out, of one rank or summed over several, that are gradients."""
    *parts, present = torch.split(flat, [*(p.numel() for p in parameters), len(parameters)])
    for parameter, part, has in zip(parameters, parts, present.tolist(), strict=True):
        if has:
            yield parameter, part.view_as(parameter)
