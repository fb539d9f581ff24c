"""The exchanges of a MoE layer: of everyone's routing, and of rows along a route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from schedc_runtime.ranks.exchange import Exchange, Pending, exchanged
from schedc_runtime.transport.collectives import Splits

Hop = Literal["flat", "rail", "node"]
"""flat: between all ranks of the group at once. rail: between nodes. node: inside a node."""


class Splitting(Protocol):
    """The part of a `Route` that an exchange uses."""

    def splits(self, hop: Hop, reverse: bool, payload: int) -> tuple[Splits, Splits]:
        """Rows to send to and to receive from each member, for each of ``payload`` tensors."""
        ...


class RoutingExchange(Exchange):
    """Gathers everyone's choices of experts: [N, k] to [ranks, N, k], as int16 if that holds the expert numbers.

    All ranks then know all counts, so that nothing else about the routing is sent. Entries are expert numbers, or
    negative: see `DROPPED` and `ABSENT`. rows: N after padding, if ranks differ in the number of their tokens.
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
"""Entries of a routing: a choice that the capacity dropped, and every choice of a row that is padding."""


class RowExchange(Exchange):
    """Moves rows between ranks by the route's splits for one hop.

    reverse: the way back, for a combine: the splits of the dispatch with both sides swapped. The gradient of an
    exchange is the exchange in the other direction.
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
