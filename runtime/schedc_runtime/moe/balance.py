"""Balances how tokens choose experts: loads, router biases that follow them, and the auxiliary loss.

    router --> tally --> [balance] ---------> balance: its gradient enters where the layer ends
                 \\-> sums of shares -------/

The auxiliary loss counts all tokens of a microbatch on all replicas: on every rank that holds the layer. It needs two
sums per expert from every replica. Their exchange (in brackets) overlaps with the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from schedc_runtime.kernels.library import operation
from schedc_runtime.moe.capacity import marked_choices
from schedc_runtime.moe.counts import ABSENT, Counts, Shape
from schedc_runtime.moe.placement import PlacedNumbers
from schedc_runtime.moe.router import RouterConfig
from schedc_runtime.moe.step_lender import StepLender
from schedc_runtime.ranks.exchange import Exchange, Pending
from schedc_runtime.recompute.regions import replaying
from schedc_runtime.transport.collective_calls import Communicator


def load_of(everyone: Tensor, experts: int) -> Tensor:
    """[experts] int64: choices of each expert in ``everyone``'s routing [ranks, N, k], dropped ones included."""
    chosen = everyone.flatten().long()
    chosen = torch.where(chosen < ABSENT, marked_choices(chosen), chosen)
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen.clamp(min=0), (chosen >= 0).long())


def updated_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """``bias`` [experts] after a step: raised by ``rate`` where ``load`` [experts] is below its mean, lowered above.

    Loads are compared as whole numbers, so that every rank gets the same bits.
    """
    above = (load * len(load) - load.sum()).sign()
    return bias - rate * above.to(bias.dtype)


def _add(chosen: Tensor, dropped: Tensor, table: Tensor, drops: bool) -> None:
    counts = Counts(table, Shape(len(chosen), capacity=0 if drops else None))
    chosen += counts.chosen.sum(0)
    if drops:
        dropped += counts.dropped.sum()


_add_load = operation(
    "add_load(Tensor(a!) chosen, Tensor(b!) dropped, Tensor table, bool drops) -> ()", _add, "loads:launch_add_load"
)


class Loads(nn.Module):
    """The identity on everyone's counts [ranks, columns], which sums the choices of each trained microbatch.

    With hot experts by microbatch it takes everyone's choices [ranks, N, k] instead. chosen: [experts] choices since
    `clear`, on all ranks of the expert group. dropped: choices beyond a capacity. drops: whether there is
    a capacity. lender: who lends the hot experts of a step, and needs its rows. placed: numbers of places, by which
    counts come; None where every expert is at the place of its number.
    """

    differentiable = False
    chosen: Tensor
    dropped: Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.register_buffer("chosen", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.drops = False
        self.lender: StepLender | None = None
        self.placed: PlacedNumbers | None = None

    def reset_parameters(self) -> None:
        """Begin at zero, as a module on the meta device does when it is materialized."""
        self.clear()

    def clear(self) -> None:
        """Clear the counts."""
        self.chosen.zero_()
        self.dropped.zero_()

    def forward(self, everyone: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and not replaying():
            if everyone.dim() == 3:
                self._add(load_of(everyone, len(self.chosen)))
            elif self.lender is not None:
                self._add(self.lender.count(everyone).sum(0))
            elif self.placed is None:
                _add_load(self.chosen, self.dropped, everyone, self.drops)
            else:
                chosen = torch.zeros_like(self.chosen)
                _add_load(chosen, self.dropped, everyone, self.drops)
                self._add(chosen)
        return everyone

    def _add(self, chosen: Tensor) -> None:
        """Add the choices of a microbatch by place, [experts]."""
        self.chosen += chosen if self.placed is None else self.placed.of_experts(chosen)


def _tallied(index: Tensor, sums: Tensor) -> Tensor:
    return torch.stack([load_of(index, len(sums)).double(), sums.double()]).unsqueeze(0)


_tally_of = operation("tally(Tensor index, Tensor sums) -> Tensor", _tallied, "loads:launch_tally")


class Tally(nn.Module):
    """What other replicas need to know of this rank's tokens: (index [N, k], shares [N, experts]) to (tally, sums).

    tally: [1, 2, experts] float64: choices of each expert, and the sum of its shares. sums: [experts] the sums of
    shares with a gradient.
    """

    def forward(self, index: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        sums = shares.sum(0)
        return _tally_of(index, sums.detach()), sums


class BalanceExchange(Exchange):
    """Gathers everyone's tally: [1, 2, experts] to [replicas, 2, experts], over all ``replicas`` of the layer.

    Replicas are the ranks of the expert group. With several pipelines they are the ranks of all expert groups.
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


def _balanced(
    sums: Tensor, everyone: Tensor, total: Tensor | None, top: int, balance: float, scale: float
) -> tuple[Tensor, Tensor]:
    chosen, shares = everyone.sum(0)
    slope = loss_slope(chosen, top) * balance
    loss = (slope * shares).sum()
    return (slope * (len(everyone) * scale)).to(sums.dtype), loss if total is None else total + loss


_balance = operation(
    "balance(Tensor sums, Tensor everyone, Tensor? total, int top, float balance, float scale) -> (Tensor, Tensor)",
    _balanced,
    "weights:launch_balance",
)
"""The gradient of the auxiliary loss for ``sums`` [experts], and the loss, added to ``total``."""


class AuxiliaryLoss(nn.Module):
    """Adds the auxiliary loss. It is the identity on the layer's output, and its backward differentiates

        loss = balance * experts * sum_e (fraction of all choices that fell on e) * (mean share of e)

    over all tokens of the microbatch on all replicas, which may have different numbers of tokens. Fractions have no
    gradient (Fedus et al., 2021, section 2.2). This rank adds its part times the number of replicas. The mean of the
    replicas' gradients is then the gradient of the loss, as for any mean loss. Tensor ranks are one replica.

    output: [N, width]. sums: [experts] shares summed over this rank's tokens. everyone: [replicas, 2, experts] choices
    of each expert, and sums of shares.
    """

    def __init__(self, routing: RouterConfig) -> None:
        super().__init__()
        self.routing = routing
        self.scale = 1.0
        """Factor of a microbatch's training loss before its backward."""
        self.sharing = 1
        """Number of ranks that have one batch together: their gradients are parts of a sum and not of a mean."""
        self.total: Tensor | None = None
        """Sum of the losses of the microbatches trained since `clear`, without `scale`."""
        self.microbatches = 0

    def clear(self) -> None:
        """Clear the losses."""
        self.total, self.microbatches = None, 0

    def forward(self, output: Tensor, sums: Tensor, everyone: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        total, factors = self.total, (self.routing.balance, self.scale / self.sharing)
        gradient, total = _balance(sums.detach(), everyone, total, self.routing.top, *factors)
        if self.training and not replaying():
            self.total = total
            self.microbatches += 1
        result: Tensor = _AddGradient.apply(output, sums, gradient)  # type: ignore[no-untyped-call]
        return result


def loss_slope(load: Tensor, k: int) -> Tensor:
    """[experts] float64: what a token's share of each expert adds to the loss. load: [experts] all choices.

    Every token has ``k`` choices. Summed over all tokens, slope times shares is 1 if the loads or the shares are even.
    """
    chosen, experts = load.double(), len(load)
    total = chosen.sum().clamp(min=1)
    return chosen / total * (experts * k) / total


class _AddGradient(torch.autograd.Function):
    """The identity on the first argument; gives the second the third as its gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, sums: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.gradient, None
