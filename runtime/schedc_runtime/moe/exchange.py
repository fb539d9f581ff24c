"""The places in a MoE layer where rows move between ranks: leaves of every trace, at which a stage is cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from schedc_runtime.ranks.expert_group import ExpertGroup
from schedc_runtime.transport.base import Handle
from schedc_runtime.transport.collectives import Communicator, Splits

Hop = Literal["flat", "rail", "node"]
"""flat: between all ranks of the group at once. rail: between nodes. node: inside a node."""


class Splitting(Protocol):
    """What an exchange needs of a `Route`."""

    def splits(self, hop: Hop, reverse: bool, payload: int) -> tuple[Splits, Splits]:
        """Rows to send to and to receive from each member, for each of ``payload`` tensors."""
        ...


class Pending(NamedTuple):
    """An exchange under way."""

    communicator: Communicator
    handle: Handle


class Exchange(nn.Module, ABC):
    """A communication at which a stage is cut: those of a MoE layer, or one of your own.

    label: what is exchanged, in one word: ``routing``, ``dispatch``, ``combine``, ``hot`` or ``balance`` of a MoE
    layer. lane: the links it takes, ``rail`` between nodes or ``node`` inside one. differentiable: whether its payload
    carries gradients back. group: the ranks that take part; set it yourself in an exchange of your own.

    Called as a module it blocks, and is differentiable; `start`, `ready` and `finish` are the same in three steps,
    `start_backward` and `finish_backward` its gradient. An in-process group of several ranks has only the steps.
    """

    label: str
    differentiable: bool

    def __init__(self) -> None:
        super().__init__()
        self.group = ExpertGroup.solo()

    @property
    def lane(self) -> str:
        return "rail" if self.group.nodes > 1 else "node"

    @abstractmethod
    def start(self, route: Any, *payload: Tensor) -> Pending: ...

    def ready(self, pending: Pending) -> bool:
        """Whether `finish` would not have to wait for another rank of the same process."""
        return pending.communicator.ready(pending.handle)

    @abstractmethod
    def finish(self, pending: Pending) -> tuple[Tensor, ...]: ...

    def start_backward(self, route: Any, *gradients: Tensor) -> Pending:
        """Send back the gradients of what `finish` gave: a tensor for each, zeros where there is none."""
        raise TypeError(f"the exchange `{self.label}` carries no gradients")

    def finish_backward(self, pending: Pending) -> tuple[Tensor, ...]:
        """The gradients of the payload, in its order."""
        raise TypeError(f"the exchange `{self.label}` carries no gradients")

    @abstractmethod
    def forward(self, route: Any, *payload: Tensor) -> tuple[Tensor, ...]: ...


class RoutingExchange(Exchange):
    """Everyone's choice of experts: [N, k] to [ranks, N, k], int16 while that is enough for the experts.

    With it all ranks know all counts, so that nothing else about the routing has to be sent. Entries are expert
    numbers, or `ABSENT` below. rows: N after padding, where ranks differ in the number of their tokens.
    """

    label, differentiable = "routing", False

    def __init__(self, experts: int, rows: int | None = None) -> None:
        super().__init__()
        self.dtype = torch.int16 if experts < 2**15 else torch.int32
        self.rows = rows

    def start(self, route: None, *payload: Tensor) -> Pending:
        (index,) = payload
        sent = index.to(self.dtype)
        if self.rows is not None and self.rows != len(sent):
            sent = torch.cat([sent, sent.new_full((self.rows - len(sent), sent.shape[1]), ABSENT)])
        return Pending(self.group.expert, self.group.expert.all_gather(sent, self.label))

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        return (pending.communicator.wait(pending.handle),)

    def forward(self, route: None, *payload: Tensor) -> tuple[Tensor, ...]:
        return self.finish(self.start(route, *payload))


DROPPED, ABSENT = -1, -2
"""In a routing: a choice that capacity has dropped; every choice of a row that is padding."""


class RowExchange(Exchange):
    """Moves rows between ranks by the splits that the route has for one hop.

    reverse: the way back, of a combine; the splits are those of the dispatch with both sides swapped. The gradient
    of an exchange is the exchange in the other direction.
    """

    differentiable = True

    def __init__(self, label: str, hop: Hop, *, reverse: bool = False) -> None:
        super().__init__()
        self.label, self.hop, self.reverse = label, hop, reverse

    @property
    def lane(self) -> str:
        return super().lane if self.hop == "flat" else self.hop

    def start(self, route: Splitting, *payload: Tensor) -> Pending:
        return self._start(route, payload, self.reverse, self.label)

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        moved: tuple[Tensor, ...] = pending.communicator.wait(pending.handle)
        return moved

    def start_backward(self, route: Splitting, *gradients: Tensor) -> Pending:
        return self._start(route, gradients, not self.reverse, f"{self.label} backward")

    def finish_backward(self, pending: Pending) -> tuple[Tensor, ...]:
        return self.finish(pending)

    def forward(self, route: Splitting, *payload: Tensor) -> tuple[Tensor, ...]:
        return exchanged(self, route, *payload)

    def _start(self, route: Splitting, tensors: Sequence[Tensor], reverse: bool, label: str) -> Pending:
        communicator = {"flat": self.group.expert, "rail": self.group.rail, "node": self.group.node}[self.hop]
        send, receive = route.splits(self.hop, reverse, len(tensors))
        return Pending(communicator, communicator.all_to_all(tensors, send, receive, label))


def exchanged(exchange: Exchange, route: Any, *payload: Tensor) -> tuple[Tensor, ...]:
    """What a differentiable exchange gives, for autograd: waits at once, forward and backward."""
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
