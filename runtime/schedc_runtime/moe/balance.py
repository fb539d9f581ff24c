"""How evenly tokens choose experts: loads, the biases that follow them, and the auxiliary loss.

    router --> tally --> [balance] ---------> balance: its gradient enters where the layer ends
                 \\-> sums of shares -------/

The auxiliary loss is that of all tokens of all replicas: of a microbatch, on every rank that holds the layer. It needs
two sums of each expert from everyone, which are on their way (the exchange in brackets) while the layer works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.moe.capacity import marked
from schedc_runtime.moe.exchange import ABSENT
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.ranks.exchange import Exchange, Pending
from schedc_runtime.recompute.regions import replaying
from schedc_runtime.transport.collectives import Communicator


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


class Loads(nn.Module):
    """Counts who chose what in each microbatch that is trained on: the identity on everyone's routing [ranks, N, k].

    chosen: [experts] choices since `clear`, of all ranks of the expert group; dropped: how many a capacity dropped.
    """

    chosen: Tensor
    dropped: Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.register_buffer("chosen", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)

    def clear(self) -> None:
        """Forget the counts."""
        self.chosen.zero_()
        self.dropped.zero_()

    def forward(self, everyone: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and not replaying():
            self.chosen += load_of(everyone, len(self.chosen))
            self.dropped += (everyone < ABSENT).sum()
        return everyone


class Tally(nn.Module):
    """What everyone must know of this rank's tokens: (index [N, k], shares [N, experts]) to (tally, sums [experts]).

    tally: [1, 2, experts] float64: how often each expert was chosen, and the sum of its shares. sums: these again, for
    their gradient.
    """

    def forward(self, index: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        sums = shares.sum(0)
        chosen = load_of(index, len(sums))
        return torch.stack([chosen.double(), sums.detach().double()]).unsqueeze(0), sums


class BalanceExchange(Exchange):
    """Everyone's tally: [1, 2, experts] to [replicas, 2, experts], over all ``replicas`` of the layer.

    They are the ranks of the expert group, and with more pipelines side by side those of all expert groups.
    """

    label, differentiable = "balance", False

    def __init__(self, replicas: Communicator) -> None:
        super().__init__()
        self.replicas = replicas

    def start(self, route: None, *payload: Tensor) -> Pending:
        (tally,) = payload
        return Pending(self.replicas, self.replicas.all_gather(tally.squeeze(0), self.label))

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        return (pending.communicator.wait(pending.handle),)

    def forward(self, route: None, *payload: Tensor) -> tuple[Tensor, ...]:
        return self.finish(self.start(route, *payload))


class Balance(nn.Module):
    """Adds the auxiliary loss: the identity on the layer's output, whose backward differentiates

        loss = balance * experts * sum_e (fraction of all choices that fell on e) * (mean share of e)

    over all tokens of the microbatch on all replicas, however many each has. Fractions have no gradient (Fedus et al.,
    2021, section 2.2). What this rank adds is its part times the number of replicas, so that, as for any mean
    loss, averaging the replicas' gradients gives the loss's gradient.
    """

    def __init__(self, routing: RouterConfig) -> None:
        super().__init__()
        self.routing = routing
        self.scale = 1.0
        """What the training loss of a microbatch is multiplied by before its backward."""
        self.total: Tensor | None = None
        """The losses of the microbatches trained on since `clear`, added up, without `scale`."""
        self.microbatches = 0

    def clear(self) -> None:
        """Forget the losses."""
        self.total, self.microbatches = None, 0

    def forward(self, output: Tensor, sums: Tensor, everyone: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        chosen, shares = everyone.sum(0)
        slope = loss_slope(chosen, self.routing.top) * self.routing.balance
        if self.training and not replaying():
            loss = (slope * shares).sum()
            self.total = loss if self.total is None else self.total + loss
            self.microbatches += 1
        gradient = (slope * (len(everyone) * self.scale)).to(sums.dtype)
        result: Tensor = _AddGradient.apply(output, sums, gradient)  # type: ignore[no-untyped-call]
        return result


def loss_slope(load: Tensor, k: int) -> Tensor:
    """What the share of one token of each expert adds to the loss, [experts] float64, where ``load`` is all choices.

    Every token has ``k`` of them: the sum of slope times shares over all tokens is 1 where loads, or shares, are even.
    """
    chosen, experts = load.double(), len(load)
    total = chosen.sum().clamp(min=1)
    return chosen / total * (experts * k) / total


class _AddGradient(torch.autograd.Function):
    """The identity on the first argument; the second gets the third as its gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, sums: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.gradient, None
