"""Gradients of tied weights, summed over the ranks that hold a copy: the REDUCE between two of them, and the sum.

    rank 0   g0 ---->  <---- g3   rank 3       both compute g0 + g3, in the order of the copies

Gradients travel as they are, without a copy. Nothing here waits for the device, except where a copy has no gradient:
only the other ranks' marks then say whether the sum exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from schedc_runtime.transport.base import Transfer, Transport


class TiedOperands(NamedTuple):
    """Operands of the REDUCE of a tie.

    tie: its number in the program. peer: the rank with the other copy. place, peer_place: of both among the copies.
    copies: how many there are. last: whether this is the rank's last exchange of the tie.
    parameters: those of the tie, in one order on all ranks.
    """

    tie: int
    peer: int
    place: int
    peer_place: int
    copies: int
    last: bool
    parameters: tuple[nn.Parameter, ...]


class TiedSum:
    """The gradients of one tie in all copies, on their way; a `PendingSum`.

    parts: [copies] of each copy its gradients, one per trained parameter and of its shape, then marks [parameters],
    1 where the copy has a gradient.
    """

    def __init__(self, transport: Transport, op: TiedOperands) -> None:
        self.transport, self.place = transport, op.place
        self.parameters = [parameter for parameter in op.parameters if parameter.requires_grad]
        self.handles: list[Any] = []
        self.parts: list[Sequence[Tensor]] = [()] * op.copies
        if self.parameters:
            self.parts[op.place] = _own(self.parameters)

    def exchange(self, op: TiedOperands) -> None:
        """Start sending this rank's gradients to a peer, and receiving those of the peer."""
        if not self.parameters:
            return
        mine = tuple(self.parts[self.place])
        theirs = tuple([torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in mine])
        self.parts[op.peer_place] = theirs
        self.handles += self.transport.post([Transfer(op.peer, True, theirs), Transfer(op.peer, False, mine)])

    def ready(self) -> bool:
        """Whether `finish` would not block."""
        return not self.transport.cooperative or all(self.transport.ready(handle) for handle in self.handles)

    def finish(self) -> None:
        """Put the sums over all copies in place of this rank's gradients."""
        for handle in self.handles:
            self.transport.wait(handle)
        for position, parameter in enumerate(self.parameters):
            if parameter.grad is None and not any(bool(part[-1][position]) for part in self.parts):
                continue  # no copy has a gradient
            parameter.grad = _sum([part[position] for part in self.parts], self.place)


def _own(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
    """The gradients of this rank, zeros for those that are not there, and the marks."""
    present = [parameter.grad is not None for parameter in parameters]
    device = parameters[0].device
    marks = torch.ones(len(present), dtype=torch.uint8, device=device)
    if not all(present):
        marks = torch.tensor(present, dtype=torch.uint8, device=device)
    return (*[_gradient(parameter) for parameter in parameters], marks)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, requires_grad=False)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def _sum(parts: Sequence[Tensor], own: int) -> Tensor:
    """The sum of the parts, all of one shape, from the first on. It is put into a part that was received."""
    total = torch.add(parts[0], parts[1], out=parts[1 if own == 0 else 0])
    for part in parts[2:]:
        total = total.add_(part)
    return total
