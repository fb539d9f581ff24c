"""The base class of communications between ranks inside a stage, at which a stage is cut into segments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transport.base import Handle
from schedc_runtime.transport.collective_calls import Communicator


class Pending(NamedTuple):
    """An exchange in flight."""

    communicator: Communicator
    handle: Handle


class RoutingLayer(nn.Module):
    """A layer that sends rows by their values, with exchanges inside. Its steps count rows on the host."""


class RoutingPart(nn.Module):
    """A module inside a `RoutingLayer`. Its exchanges are exchanges of the layer."""


class Exchange(nn.Module, ABC):
    """A communication at which a stage is cut: an exchange of a MoE layer, or a class of your own.

    label: the kind of payload, in one word. MoE layers have ``routing``, ``sizes``, ``dispatch``, ``combine``, ``hot``
    and ``balance``. lane: the links that it takes, ``rail`` between nodes or ``node`` inside one; ``host`` for a copy
    to the rank's own host. differentiable: whether gradients of its payload come back. group: the ranks that take part;
    set it in an exchange of your own.

    payload: the tensors to send; `finish` returns the received ones. Rows go as [rows sent, ...] to
    [rows received, ...]. Gradients have the shapes of what they belong to.

    A call as a module blocks and is differentiable. `start`, `ready` and `finish` are the same in three steps;
    `start_backward` and `finish_backward` are the gradient. An in-process group of several ranks has only the steps.
    """

    label: str
    differentiable: bool
    place = ""
    """Path in the model of the module around which it was inserted; "" for one that the model itself has."""
    returns = False
    """Whether gradients of what `finish` has returned go back behind the W of the segment that takes them."""
    recorded_whole = True
    """A recorded model calls an exchange as one node, though it has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.group = ExpertGroup.solo()

    @property
    def lane(self) -> str:
        return "rail" if self.group.nodes > 1 else "node"

    @abstractmethod
    def start(self, route: Any, *payload: Tensor) -> Pending: ...

    def ready(self, pending: Pending) -> bool:
        """Whether `finish` would return without waiting for another rank of the same process."""
        return pending.communicator.ready(pending.handle)

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        """The received tensors; by default those of an `all_to_all`."""
        received: tuple[Tensor, ...] = pending.communicator.wait(pending.handle)
        return received

    def start_backward(self, route: Any, *gradients: Tensor) -> Pending:
        """Send back the gradients of the tensors that `finish` returned; zeros for a tensor without a gradient."""
        raise TypeError(f"the exchange `{self.label}` carries no gradients")

    def finish_backward(self, pending: Pending) -> tuple[Tensor | None, ...]:
        """The gradients of the payload, in its order; None where a tensor has none."""
        raise TypeError(f"the exchange `{self.label}` carries no gradients")

    def start_return(self, route: Any) -> Pending:
        """Start to send back what `returns` says, which the segment's W makes."""
        raise TypeError(f"the exchange `{self.label}` returns nothing behind W")

    def finish_return(self, route: Any, pending: Pending) -> None:
        """Add what `start_return` has brought to gradients of parameters."""
        raise TypeError(f"the exchange `{self.label}` returns nothing behind W")

    def forward(self, route: Any, *payload: Tensor) -> tuple[Tensor, ...]:
        if self.differentiable:
            return exchanged(self, route, *payload)
        return self.finish(self.start(route, *payload))


def exchanged(exchange: Exchange, route: Any, *payload: Tensor) -> tuple[Tensor, ...]:
    """[rows sent, ...] to [rows received, ...]: a differentiable exchange. Forward and backward wait at once."""
    moved: tuple[Tensor, ...] = _Exchanged.apply(exchange, route, *payload)  # type: ignore[no-untyped-call]
    return moved


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, route: Any, *payload: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.route = exchange, route
        return exchange.finish(exchange.start(route, *payload))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        return None, None, *exchange.finish_backward(exchange.start_backward(ctx.route, *gradients))
