"""How evenly tokens choose experts: loads, the biases that follow them, and the auxiliary loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.memory.regions import replaying
from schedc_runtime.moe.capacity import marked
from schedc_runtime.moe.exchange import ABSENT
from schedc_runtime.moe.router import Routing


def load_of(everyone: Tensor, experts: int) -> Tensor:
    """[experts] int64: how often each was chosen in ``everyone``'s routing [ranks, N, k], dropped choices included."""
    chosen = everyone.flatten().long()
    chosen = torch.where(chosen < ABSENT, marked(chosen), chosen)
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen.clamp(min=0), (chosen >= 0).long())


def updated_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """``bias`` [experts] after a step with ``load``: raised by ``rate`` below the mean load, lowered above it.

    Loads are whole numbers and compared as such: every rank comes to the same bits.
    """
    above = (load * len(load) - load.sum()).sign()
    return bias - rate * above.to(bias.dtype)


class Balance(nn.Module):
    """Counts who chose what, and adds the auxiliary loss: the identity on the weights, whose backward differentiates

        loss = balance * experts * sum_e load_e * share_e

    load_e: the fraction of all choices that fell on e, over all ranks of the group; share_e: the mean share here.
    Loads have no gradient. The mean of this over ranks with equally many tokens is the loss of the whole batch, so
    that, as for any mean loss, averaging the ranks' gradients gives its gradient, however the batch is spread.
    """

    load: Tensor
    dropped: Tensor

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.scale = 1.0
        """What the training loss of a microbatch is multiplied by before its backward."""
        self.loss: Tensor | None = None
        """The auxiliary loss of the last microbatch, detached and without `scale`."""
        self.register_buffer("load", torch.zeros(routing.experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)

    def clear(self) -> None:
        """Forget the counts."""
        self.load.zero_()
        self.dropped.zero_()

    def forward(self, everyone: Tensor, shares: Tensor, weight: Tensor) -> Tensor:
        if replaying():
            return weight
        load = load_of(everyone, self.routing.experts)
        if self.training and torch.is_grad_enabled():
            self.load += load
            self.dropped += (everyone < ABSENT).sum()
        if not self.routing.balance:
            return weight
        loss = balance_loss(load, shares) * self.routing.balance
        self.loss = loss.detach()
        result: Tensor = _AddLoss.apply(weight, loss, self.scale)  # type: ignore[no-untyped-call]
        return result


def balance_loss(load: Tensor, shares: Tensor) -> Tensor:
    """experts * sum over experts of (fraction of ``load`` [experts]) * (mean of ``shares`` [N, experts]); 1 if even."""
    fraction = load.to(shares.dtype) / load.sum().clamp(min=1)
    return (fraction * (shares.sum(0) / max(1, len(shares)))).sum() * len(load)


class _AddLoss(torch.autograd.Function):
    """The identity on the first argument; the loss, the second, is differentiated as if added to the total."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss.detach()
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full_like(ctx.like, ctx.scale), None
