"""`Taken`: what replaces a tensor that a stage took or gave away: it collects the gradient, and holds no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Taken:
    """Replaces a tensor. Holds its gradient, with the strides of the tensor, and not the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.grad: Tensor | None = None
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        self.stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()

    def take(self, grad: Tensor) -> None:
        """Hold the gradient, which has the shape of the tensor."""
        if grad.stride() != self.stride:
            grad = torch.empty_strided(grad.shape, self.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        self.grad = grad

    def add(self, grad: Tensor) -> None:
        """Add a gradient, which has the shape of the tensor, as it is."""
        self.grad = grad if self.grad is None else self.grad + grad

    def zeros(self) -> Tensor:
        """Zeros in the shape and with the strides of the tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


def let_go(tensor: Tensor) -> tuple[Tensor, Taken]:
    """(a tensor to compute with in place of ``tensor``, what collects its gradient), both of its shape.

    The graph holds only what it saves for the backward, and no leaf.
    """
    taken = Taken(tensor)
    if not tensor.requires_grad:
        return tensor.detach(), taken
    entered: Tensor = _Enter.apply(_anchor, tensor.detach(), taken)  # type: ignore[no-untyped-call]
    return entered, taken


class _Enter(torch.autograd.Function):
    """Begins a graph: the gradient goes to a `Taken`. The anchor makes autograd run this backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, taken: Taken) -> Tensor:
        ctx.taken = taken
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.taken.take(grad)
        return None, None, None


_anchor = torch.zeros((), requires_grad=True)
