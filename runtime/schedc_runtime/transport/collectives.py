"""Collectives of a group over torch.distributed, and of a group of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from schedc_runtime.transport.base import MessageMismatch, TransportError
from schedc_runtime.transport.collective_calls import (
    CollectiveCall,
    Communicator,
    Splits,
    call_place,
    checked_call,
    count_broadcast,
    count_reduce,
    count_sent,
    count_sum,
    ordered_sum,
    padded_share,
    shares,
    whole_of,
)
from schedc_runtime.transport.distributed import plain_text, wait_for
from schedc_runtime.transport.process_groups import leave_groups
from schedc_runtime.transport.rows import RowFormat, buffer_of


class SoloCommunicator:
    """A group of one rank: every collective is complete when it starts.

    An `all_gather` of a tensor [...] returns [1, ...], a `reduce_scatter` its elements in one row. Other collectives
    return their tensors.
    """

    cooperative = False

    def __init__(self, name: str = "solo") -> None:
        self.name, self.rank, self.size, self.issued, self.sent = name, 0, 1, 0, [0]

    def all_to_all(self, tensors: Sequence[Tensor], send: Splits, receive: Splits, label: str = "") -> _Done:
        calls = checked_call(self, label, tensors, send, receive)
        if calls.send != calls.receive:
            raise MessageMismatch(
                f"{call_place(self, calls)}: sends {calls.send} to itself and receives {calls.receive}"
            )
        return self._start(tuple(tensors))

    def all_gather(self, tensor: Tensor, label: str = "") -> _Done:
        return self._start(tensor.unsqueeze(0))

    def reduce_scatter(self, tensor: Tensor, label: str = "") -> _Done:
        return self._start(tensor.reshape(-1))

    def sum(self, tensor: Tensor, label: str = "") -> _Done:
        return self._start(tensor)

    def broadcast(self, tensor: Tensor, source: int, label: str = "") -> _Done:
        return self._start(tensor)

    def reduce(self, tensor: Tensor, target: int, label: str = "") -> _Done:
        return self._start(tensor.zero_())

    def ready(self, handle: _Done) -> bool:
        return True

    def wait(self, handle: _Done) -> Any:
        return handle.result

    def close(self) -> None:
        return

    def _start(self, result: Any) -> _Done:
        self.issued += 1
        return _Done(result)


class TorchCommunicator:
    """The ranks of a process group of torch.distributed: gloo between CPU processes, NCCL between GPUs.

    timeout: seconds of the longest wait. gloo raises after it; NCCL has its own watchdog, set by the timeout that
        the group was made with.
    """

    cooperative = False

    def __init__(self, group: dist.ProcessGroup, timeout: float, name: str = "group") -> None:
        self.name, self.rank, self.size = name, dist.get_rank(group), dist.get_world_size(group)
        self.issued, self.sent = 0, [0] * self.size
        self._group: dist.ProcessGroup | None = group
        self._timeout = timedelta(seconds=timeout)

    def limit_waits(self, seconds: float) -> None:
        """Limit each further wait to so many seconds."""
        self._timeout = timedelta(seconds=seconds)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group; None once it is closed."""
        return self._group

    def all_to_all(self, tensors: Sequence[Tensor], send: Splits, receive: Splits, label: str = "") -> _Started:
        call = checked_call(self, label, tensors, send, receive)
        form, device = RowFormat.of(tensors), tensors[0].device
        leaving = buffer_of(tensors)
        if leaving is None:
            leaving = form.new_buffer(sum(send), device)
            for view, tensor in zip(form.views(leaving), tensors, strict=True):
                view.copy_(tensor)
        coming = form.new_buffer(sum(receive), device)
        started = self._start(call, dist.all_to_all_single, coming, leaving, list(receive), list(send))
        return started._replace(finish=lambda: form.views(coming))

    def all_gather(self, tensor: Tensor, label: str = "") -> _Started:
        call = CollectiveCall("all_gather", label, self.issued)
        count_sent(self, [tensor.nbytes] * self.size)
        sent = tensor.contiguous()
        gathered = sent.new_empty(self.size, *sent.shape)
        targets = [_bytes(gathered[member]) for member in range(self.size)]
        started = self._start(call, dist.all_gather, targets, _bytes(sent))
        return started._replace(finish=lambda: gathered)

    def reduce_scatter(self, tensor: Tensor, label: str = "") -> _Started:
        call = CollectiveCall("reduce_scatter", label, self.issued)
        parts = shares(tensor.numel(), self.size)
        count_sent(self, [part * tensor.element_size() for part in parts])
        return self._scatter(call, tensor, parts)

    def sum(self, tensor: Tensor, label: str = "") -> _Started:
        call = CollectiveCall("sum", label, self.issued)
        count_sum(self, tensor)
        scattered = self._scatter(call, tensor, shares(tensor.numel(), self.size))
        return scattered._replace(finish=lambda: self._gather_sums(call, scattered.finish(), tensor.shape))

    def broadcast(self, tensor: Tensor, source: int, label: str = "") -> _Started:
        call = CollectiveCall("broadcast", label, self.issued, root=source)
        count_broadcast(self, tensor, source)
        started = self._start(call, _broadcast_from(source), None, _bytes(tensor))
        return started._replace(finish=lambda: tensor)

    def reduce(self, tensor: Tensor, target: int, label: str = "") -> _Started:
        call = CollectiveCall("reduce", label, self.issued, root=target)
        count_reduce(self, tensor, target)
        item, parts = tensor.element_size(), shares(tensor.numel(), self.size)
        mine = parts[self.rank]
        received = tensor.new_empty(self.size - 1, mine)
        sizes = [mine * item * (member != target) for member in range(self.size)]
        sent = [part * item * (self.rank != target) for part in parts]
        leaving = _bytes(tensor) if self.rank != target else _bytes(tensor)[:0]
        started = self._start(call, dist.all_to_all_single, _bytes(received), leaving, sizes, sent)
        return started._replace(finish=lambda: self._collect_sums(call, received, parts, tensor, target))

    def ready(self, handle: _Started) -> bool:
        return True

    def wait(self, handle: _Started) -> Any:
        if not handle.work:
            raise RuntimeError(f"{call_place(self, handle.call)}: waited for twice")
        try:
            wait_for(handle.work.pop(), self._timeout, on_stream=handle.on_stream)
        except RuntimeError as error:
            raise TransportError(f"{call_place(self, handle.call)}: {plain_text(error)}") from None
        return handle.finish()

    def close(self) -> None:
        leave_groups(self.take_group(), abort=False)

    def take_group(self) -> list[dist.ProcessGroup]:
        """The group, if it is not closed, for the caller to leave: nothing more is sent through it."""
        # A group closes with its last reference, and tracebacks may keep this object alive.
        group, self._group = self._group, None
        return [] if group is None else [group]

    def _scatter(self, call: CollectiveCall, tensor: Tensor, parts: list[int]) -> _Started:
        """Send each member its share of the tensor; `wait` adds up this member's share."""
        item, mine = tensor.element_size(), parts[self.rank]
        received = tensor.new_empty(self.size, mine)
        sizes, sent = [mine * item] * self.size, [part * item for part in parts]
        started = self._start(call, dist.all_to_all_single, _bytes(received), _bytes(tensor.contiguous()), sizes, sent)
        return started._replace(finish=lambda: padded_share(ordered_sum(received), parts[0]))

    def _gather_sums(self, call: CollectiveCall, mine: Tensor, shape: torch.Size) -> Tensor:
        """Run the second half of a sum: gather everyone's share."""
        gathered = mine.new_empty(self.size, mine.numel())
        started = self._start(call, dist.all_gather, [_bytes(row) for row in gathered], _bytes(mine), second_half=True)
        self.wait(started)
        return whole_of(gathered, shape.numel()).view(shape)

    def _collect_sums(
        self, call: CollectiveCall, received: Tensor, parts: list[int], tensor: Tensor, target: int
    ) -> Tensor:
        """Run the second half of a reduction: add up this member's share, and bring all shares to the target."""
        item, mine = tensor.element_size(), ordered_sum(received)
        coming = [part * item * (self.rank == target) for part in parts]
        leaving = [parts[self.rank] * item * (member == target) for member in range(self.size)]
        whole = _bytes(tensor) if self.rank == target else _bytes(tensor)[:0]
        halves = whole, _bytes(mine), coming, leaving
        self.wait(self._start(call, dist.all_to_all_single, *halves, second_half=True))
        return tensor

    def _start(self, call: CollectiveCall, function: Any, *arguments: Any, second_half: bool = False) -> _Started:
        try:
            work = function(*arguments, group=self._group, async_op=True)
        except RuntimeError as error:
            raise TransportError(f"{call_place(self, call)}: {plain_text(error)}") from None
        self.issued += not second_half
        return _Started(call, [work], arguments, on_stream=not arguments[1].is_cpu)


def communicator_of(group: dist.ProcessGroup | None, timeout: float, name: str) -> Communicator:
    """The communicator of ``group``; a `SoloCommunicator` without a group. timeout: seconds of the longest wait."""
    return SoloCommunicator(name) if group is None else TorchCommunicator(group, timeout, name)


class _Done(NamedTuple):
    result: Any


class _Started(NamedTuple):
    """A collective in flight.

    work: torch's handle, which `wait` takes out. kept: the tensors in use, which must outlive the work.
    on_stream: a GPU stream waits, and not the host.
    """

    call: CollectiveCall
    work: list[Any]
    kept: tuple[Any, ...]
    on_stream: bool
    finish: Callable[[], Any] = tuple


def _broadcast_from(source: int) -> Callable[..., Any]:
    def start(_: None, buffer: Tensor, *, group: Any, async_op: bool) -> Any:
        return dist.broadcast(buffer, group=group, async_op=async_op, group_src=source)

    return start


def _bytes(tensor: Tensor) -> Tensor:
    """[bytes] a contiguous tensor as bytes: gloo knows few dtypes, and only the bits matter."""
    return tensor.reshape(-1).view(torch.uint8)
