"""The exchanges among tensor ranks, and what a rank takes of its own. All are single nodes of a recording.

    rows of a sequence     whole S    own S/t           whole S     own S/t            whole S
    embedding  ---------->  enter ---> norm, add ---> gather ---> core ---> scatter ---> ... collect ---> head

Between `enter` and `collect` each rank has its own rows. The gradient of every parameter there that is not split is a
partial sum over the tensor ranks. Before `enter` and behind `collect` all ranks compute the same, and gradients are
whole. Sums are in the order of ranks, so that their bits depend on nothing else.

Sequence parallelism: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section
4.2.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from schedc_runtime.errors import PartitionError
from schedc_runtime.ranks.exchange import Exchange, Pending
from schedc_runtime.transport.collectives import SoloCommunicator

ROWS = 1
"""The dimension of a hidden state that has the rows of a sequence: [batch, rows, width]."""
COLUMNS = -1


def own_part(tensor: Tensor, dim: int, parts: int, part: int) -> Tensor:
    """Part number ``part`` of [...] cut into ``parts`` equal ones along ``dim``. Raises `PartitionError` for others."""
    size, rest = divmod(tensor.shape[dim], parts)
    if rest:
        what = "rows of a sequence" if dim == ROWS else "columns"
        raise PartitionError(
            f"{parts} tensor ranks cannot share {tensor.shape[dim]} {what}",
            f"give a multiple of {parts}, or take another number of tensor ranks",
        )
    return tensor.narrow(dim, part * size, size)


class TensorExchange(Exchange):
    """An exchange among tensor ranks of one tensor, cut along ``dim``.

    forward_gathers: whether the forward brings parts together, or takes the own part (of a sum, where ``sums``).
    backward_sums: whether ranks have different gradients of a whole tensor, which are added up.
    """

    differentiable = True
    label: str
    dim: ClassVar[int] = ROWS

    @property
    def lane(self) -> str:
        return "node"

    def outline(self, tensor: Tensor) -> Tensor:
        """The result for a fake tensor [...], with the right shape and need of a gradient."""
        raise NotImplementedError

    def forward(self, route: Any, *payload: Tensor) -> tuple[Tensor, ...]:
        if isinstance(payload[0], FakeTensor):
            return (self.outline(payload[0]),)
        return super().forward(route, *payload)

    def _gathered(self, tensor: Tensor, label: str) -> Pending:
        communicator = self.group.expert
        return Pending(communicator, communicator.all_gather(tensor, label))

    def _whole(self, pending: Pending) -> tuple[Tensor, ...]:
        """[..., whole, ...] of the parts of all ranks."""
        parts = pending.communicator.wait(pending.handle)
        dim = self.dim % (parts.dim() - 1)
        return (parts.movedim(0, dim).flatten(dim, dim + 1),)

    def _summed(self, tensor: Tensor, label: str) -> Pending:
        communicator, dim = self.group.expert, self.dim % tensor.dim()
        parts = torch.stack(tensor.tensor_split(communicator.size, dim))
        return Pending(communicator, (communicator.reduce_scatter(parts, label), parts.shape[1:]))

    def _own_sum(self, pending: Pending) -> tuple[Tensor, ...]:
        """[..., own, ...] the own part of the sum over all ranks."""
        handle, shape = pending.handle
        return (pending.communicator.wait(handle).view(shape),)

    def _own(self, tensor: Tensor) -> Pending:
        """The own part, without a communication."""
        here = SoloCommunicator(self.label)
        part = own_part(tensor, self.dim, self.group.size, self.group.rank)
        return Pending(here, here.sum(part.contiguous()))

    def _taken(self, pending: Pending) -> tuple[Tensor, ...]:
        return (pending.communicator.wait(pending.handle),)

    def ready(self, pending: Pending) -> bool:
        return True


class _ToWhole(TensorExchange):
    """Brings the parts of all ranks together."""

    def outline(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * self.group.size, self.dim)

    def start(self, route: None, *payload: Tensor) -> Pending:
        return self._gathered(payload[0], self.label)

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        return self._whole(pending)


class _ToOwn(TensorExchange):
    """Gives the own part; its gradient brings those of all ranks together."""

    def outline(self, tensor: Tensor) -> Tensor:
        return own_part(tensor, self.dim, self.group.size, 0)

    def start_backward(self, route: None, *gradients: Tensor) -> Pending:
        return self._gathered(gradients[0], f"{self.label} backward")

    def finish_backward(self, pending: Pending) -> tuple[Tensor | None, ...]:
        return self._whole(pending)


class Gather(_ToWhole):
    """Rows [B, S/t, H] of all ranks, for a core: [B, S, H]. Each rank's core gives another part of the gradient."""

    label = "gather"

    def start_backward(self, route: None, *gradients: Tensor) -> Pending:
        return self._summed(gradients[0], f"{self.label} backward")

    def finish_backward(self, pending: Pending) -> tuple[Tensor | None, ...]:
        return self._own_sum(pending)


class Feature(Gather):
    """Columns [B, S, F/t] of all ranks: [B, S, F]. What follows uses all of them on every rank, for a part."""

    label, dim = "feature", COLUMNS


class Collect(_ToWhole):
    """Rows [B, S/t, H] of all ranks, for what every rank then computes whole: [B, S, H]."""

    label = "collect"

    def start_backward(self, route: None, *gradients: Tensor) -> Pending:
        return self._own(gradients[0])

    def finish_backward(self, pending: Pending) -> tuple[Tensor | None, ...]:
        return self._taken(pending)


class CollectColumns(Collect):
    """Columns [B, S, V/t] of all ranks, of which every rank then forms the same loss: [B, S, V]."""

    dim = COLUMNS


class Sum(TensorExchange):
    """Sums what all ranks give, [B, S, H], for what every rank then computes whole. Its gradient is whole, too."""

    label = "sum"

    def outline(self, tensor: Tensor) -> Tensor:
        return tensor * 1

    def start(self, route: None, *payload: Tensor) -> Pending:
        communicator = self.group.expert
        return Pending(communicator, communicator.sum(payload[0], self.label))

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        return self._taken(pending)

    def start_backward(self, route: None, *gradients: Tensor) -> Pending:
        here = SoloCommunicator(self.label)
        return Pending(here, here.sum(gradients[0]))

    def finish_backward(self, pending: Pending) -> tuple[Tensor | None, ...]:
        return self._taken(pending)


class Scatter(_ToOwn):
    """Sums what the cores of all ranks give, [B, S, H]; each rank keeps its rows [B, S/t, H]."""

    label = "scatter"

    def start(self, route: None, *payload: Tensor) -> Pending:
        return self._summed(payload[0], self.label)

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        return self._own_sum(pending)


class Enter(_ToOwn):
    """The own rows [B, S/t, H] of [B, S, H], which all ranks have. Its gradient is whole on every rank."""

    label = "enter"

    def start(self, route: None, *payload: Tensor) -> Pending:
        return self._own(payload[0])

    def finish(self, pending: Pending) -> tuple[Tensor, ...]:
        return self._taken(pending)


class OwnColumns(nn.Module):
    """The own columns [..., F/t] of [..., F], which all ranks have. No exchange: the gradient is a partial sum.

    rank, size: of this process among the tensor ranks.
    """

    recorded_whole = True

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.size, self.rank = size, rank

    def forward(self, whole: Tensor) -> Tensor:
        return own_part(whole, COLUMNS, self.size, self.rank)
