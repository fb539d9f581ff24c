"""The exchanges of a MoE layer: of everyone's counts, and of rows along a route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from schedc_runtime.moe.counts import Counts
from schedc_runtime.moe.fp8 import packed_rows, unpacked_rows
from schedc_runtime.ranks.exchange import Exchange, Pending
from schedc_runtime.transport.collective_calls import Splits
from schedc_runtime.transport.collectives import SoloCommunicator

Hop = Literal["flat", "rail", "node"]
"""flat: between all ranks of the group at once. rail: between nodes. node: inside a node."""


class Splitting(Protocol):
    """The part of a `Route` that an exchange uses."""

    def splits(self, hop: Hop, reverse: bool) -> tuple[Splits, Splits]:
        """Rows to send to and to receive from each member, for every tensor."""
        ...


class CountsExchange(Exchange):
    """Gathers everyone's counts: [columns] to [ranks, columns], or choices [N, k] to [ranks, N, k].

    All ranks then know all sizes. With hot experts ranks gather choices, because slots change the counts.
    """

    label, differentiable = "routing", False

    def start(self, route: None, *payload: Tensor) -> Pending:
        (counts,) = payload
        return Pending(self.group.expert, self.group.expert.all_gather(counts, self.label))

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        return (pending.communicator.wait(pending.handle),)


class Leaving(Protocol):
    """The part of a `Route` that `DistinctExchange` uses."""

    counts: Counts
    leaving: Tensor | None
    """[R] rows of this rank by rank of their experts; None where the counts are right."""


class DistinctExchange(Exchange):
    """Gathers how many rows each rank sends to each over two hops, behind a plan that moved them: to [R, R] int32.

    Where nothing has moved, the counts are right, as all ranks know. Then nothing is sent.
    """

    label, differentiable = "distinct", False

    def __init__(self) -> None:
        super().__init__()
        self.nobody = SoloCommunicator("distinct")

    def start(self, route: Leaving, *payload: Tensor) -> Pending:
        if route.leaving is None:
            return Pending(self.nobody, route.counts.of_ranks)
        return Pending(self.group.expert, self.group.expert.all_gather(route.leaving, self.label))

    def ready(self, pending: Pending) -> bool:
        return pending.communicator is self.nobody or super().ready(pending)

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        if pending.communicator is self.nobody:
            return (pending.handle,)
        return (pending.communicator.wait(pending.handle),)


class RowExchange(Exchange):
    """Moves rows between ranks by the route's splits for one hop.

    reverse: the way back, for a combine: the splits of the dispatch with both sides swapped. The gradient of an
    exchange is the exchange in the other direction. Whole numbers have no gradient: nothing goes back for them.

    fp8: rows, the first of the payload, travel in fp8 with a scale each, and arrive in their own dtype. Gradients, of
    rounded rows, travel unrounded.
    """

    differentiable = True

    def __init__(self, label: str, hop: Hop, *, reverse: bool = False, fp8: bool = False) -> None:
        super().__init__()
        self.label, self.hop, self.reverse, self.fp8 = label, hop, reverse, fp8

    @property
    def lane(self) -> str:
        return super().lane if self.hop == "flat" else self.hop

    def start(self, route: Splitting, *payload: Tensor) -> Pending:
        if self.fp8:
            rows, *beside = payload
            payload = (*packed_rows(rows), *beside)
        return self._start(route, payload, self.reverse, self.label)

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        if not self.fp8:
            return super().finish(pending)
        numbers, scale, *beside = super().finish(pending)
        return (unpacked_rows(numbers, scale), *beside)

    def start_backward(self, route: Splitting, *gradients: Tensor) -> Pending:
        floating = [gradient for gradient in gradients if gradient is not None and gradient.is_floating_point()]
        return self._start(route, floating, not self.reverse, f"{self.label} backward")

    def finish_backward(self, pending: Pending) -> tuple[Tensor | None, ...]:
        """The gradients of the payload, None for the experts' numbers."""
        numbers = (None,) * (self.hop != "flat" and not self.reverse)
        return (*super().finish(pending), *numbers)

    def _start(self, route: Splitting, tensors: Sequence[Tensor], reverse: bool, label: str) -> Pending:
        communicator = {"flat": self.group.expert, "rail": self.group.rail, "node": self.group.node}[self.hop]
        send, receive = route.splits(self.hop, reverse)
        return Pending(communicator, communicator.all_to_all(tensors, send, receive, label))
