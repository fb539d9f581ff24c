"""Calls autograd's engine without the checks of `torch.autograd.backward`, which cost 10 us in Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_engine = torch.autograd.Variable._execution_engine
"""The engine itself checks the shapes."""


def differentiate(edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """Accumulate into the leaves behind ``edges``, and free the graph.

    grads: one per edge, of the shape of the edge's tensor.
    """
    _engine.run_backward(tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients_at(
    wanted: Sequence[GradientEdge], edges: Sequence[GradientEdge], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """[wanted] the gradient that arrives at each edge of ``wanted``; nothing that leads to none of them is run.

    grads: one per edge of ``edges``, of the shape of the edge's tensor. What was run of the graph is freed.
    """
    arrived: tuple[Tensor | None, ...] = _engine.run_backward(
        tuple(edges), tuple(grads), False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )
    return arrived
