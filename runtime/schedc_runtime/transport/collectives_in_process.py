"""Collectives of ranks in one process, complete when the last member starts, and checked between members.

On a GPU their copies run on a second stream, and overlap with compute; on a CPU the work runs at once. On the compute
stream the copies would wait for all work before them, and all later work would wait for the copies. Collectives between
processes have NCCL's own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.device.base import ComputeDevice, DeviceEvent, DeviceStream
from schedc_runtime.device.choice import device_for
from schedc_runtime.transport.base import MessageMismatch, describe
from schedc_runtime.transport.collective_calls import (
    CollectiveCall,
    Splits,
    call_name,
    call_place,
    checked_call,
    count_broadcast,
    count_reduce,
    count_sent,
    count_sum,
    ordered_sum,
    padded_share,
    shares,
)


class InProcessCommunicators:
    """A group of ``size`` members in one process, without threads. `member` returns the end of each.

    A collective is complete when every member has started its collective of the same number. Kinds, labels, splits,
    shapes and dtypes of members are compared. A mismatch raises when the later member starts, and names both members.
    On a GPU the copies overlap with compute (`SideStream`), at high priority with ``high``.
    """

    def __init__(self, size: int, name: str = "group", high: bool = False) -> None:
        self.size, self.name = size, name
        self._meetings: dict[int, _CollectiveMeeting] = {}
        self._copies = SideStream(name, high)
        self._members = [InProcessCommunicator(rank, self) for rank in range(size)]

    def member(self, rank: int) -> InProcessCommunicator:
        return self._members[rank]

    def forget(self) -> None:
        """Drop collectives that not all members have started."""
        self._meetings.clear()

    def unmatched(self) -> int:
        """Number of collectives that some but not all members have started."""
        return len(self._meetings)

    def join(
        self, member: InProcessCommunicator, call: CollectiveCall, tensors: tuple[Tensor, ...]
    ) -> _CollectiveMeeting:
        meeting = self._meetings.setdefault(call.number, _CollectiveMeeting())
        for other, (other_call, other_tensors) in meeting.present.items():
            _compare(self.name, (member.rank, call, tensors), (other, other_call, other_tensors))
        meeting.present[member.rank] = call, tensors
        if len(meeting.present) == self.size:
            del self._meetings[call.number]
            meeting.complete(self.size, self._copies)
        return meeting


class InProcessCommunicator:
    """One member's end of `InProcessCommunicators`.

    An `all_to_all` moves rows [sum(send), ...] to [sum(receive), ...], an `all_gather` takes [...] to [size, ...], a
    `reduce_scatter` takes [...] to a row. The others keep the shape.
    """

    cooperative = True

    def __init__(self, rank: int, hub: InProcessCommunicators) -> None:
        self.name, self.rank, self.size = hub.name, rank, hub.size
        self.issued, self.sent = 0, [0] * hub.size
        self._hub = hub

    def all_to_all(self, tensors: Sequence[Tensor], send: Splits, receive: Splits, label: str = "") -> _Joined:
        return self._join(checked_call(self, label, tensors, send, receive), tuple(tensors))

    def all_gather(self, tensor: Tensor, label: str = "") -> _Joined:
        count_sent(self, [tensor.nbytes] * self.size)
        return self._join(CollectiveCall("all_gather", label, self.issued), (tensor,))

    def reduce_scatter(self, tensor: Tensor, label: str = "") -> _Joined:
        count_sent(self, [part * tensor.element_size() for part in shares(tensor.numel(), self.size)])
        return self._join(CollectiveCall("reduce_scatter", label, self.issued), (tensor,))

    def sum(self, tensor: Tensor, label: str = "") -> _Joined:
        count_sum(self, tensor)
        return self._join(CollectiveCall("sum", label, self.issued), (tensor,))

    def broadcast(self, tensor: Tensor, source: int, label: str = "") -> _Joined:
        count_broadcast(self, tensor, source)
        return self._join(CollectiveCall("broadcast", label, self.issued, root=source), (tensor,))

    def reduce(self, tensor: Tensor, target: int, label: str = "") -> _Joined:
        count_reduce(self, tensor, target)
        return self._join(CollectiveCall("reduce", label, self.issued, root=target), (tensor,))

    def close(self) -> None:
        self.issued = 0
        self._hub.forget()

    def ready(self, handle: _Joined) -> bool:
        return handle.meeting.ahead is not None

    def wait(self, handle: _Joined) -> Any:
        ahead = handle.meeting.ahead
        if ahead is None:
            raise RuntimeError(
                f"{call_place(self, handle.call)}: waited for before all have started it; an in-process rank must "
                "return instead"
            )
        if self.rank not in ahead.result:
            raise RuntimeError(f"{call_place(self, handle.call)}: waited for twice")
        result = ahead.result.pop(self.rank)
        joined(ahead, result if isinstance(result, tuple) else (result,))
        return result

    def _join(self, call: CollectiveCall, tensors: tuple[Tensor, ...]) -> _Joined:
        self.issued += 1
        return _Joined(call, self._hub.join(self, call, tensors))


class _Joined(NamedTuple):
    call: CollectiveCall
    meeting: _CollectiveMeeting


@dataclass(slots=True)
class _CollectiveMeeting:
    """One collective: the calls of members that have started it, and the results once all have."""

    present: dict[int, tuple[CollectiveCall, tuple[Tensor, ...]]] = field(default_factory=dict)
    ahead: Ahead | None = None

    def complete(self, size: int, copies: SideStream) -> None:
        members = [self.present[rank] for rank in range(size)]
        results = _RESULTS[members[0][0].kind]
        # All results at once: a member that has waited may write into the tensors that it sent.
        taken = [tensor for _, tensors in members for tensor in tensors]
        self.ahead = copies.run(lambda: dict(enumerate(results(members))), taken)
        self.present.clear()


def _exchanged(members: list[tuple[CollectiveCall, tuple[Tensor, ...]]]) -> list[Any]:
    cut = [[torch.split(tensor, list(call.send)) for tensor in tensors] for call, tensors in members]
    width = len(cut[0])
    return [
        tuple(torch.cat([sender[position][target] for sender in cut]) for position in range(width))
        for target in range(len(members))
    ]


def _gathered(members: list[tuple[CollectiveCall, tuple[Tensor, ...]]]) -> list[Any]:
    return [torch.stack([tensor for _, (tensor,) in members]) for _ in members]


def _scattered(members: list[tuple[CollectiveCall, tuple[Tensor, ...]]]) -> list[Any]:
    total = ordered_sum(torch.stack([tensor.reshape(-1) for _, (tensor,) in members]))
    parts = shares(total.numel(), len(members))
    return [padded_share(part.clone(), parts[0]) for part in torch.split(total, parts)]


def _summed(members: list[tuple[CollectiveCall, tuple[Tensor, ...]]]) -> list[Any]:
    parts = torch.stack([tensor for _, (tensor,) in members])
    return [ordered_sum(parts) for _ in members]


def _brought(members: list[tuple[CollectiveCall, tuple[Tensor, ...]]]) -> list[Any]:
    source = members[0][0].root
    (sent,) = members[source][1]
    return [tensor if rank == source else tensor.copy_(sent) for rank, (_, (tensor,)) in enumerate(members)]


def _reduced(members: list[tuple[CollectiveCall, tuple[Tensor, ...]]]) -> list[Any]:
    target = members[0][0].root
    first, *others = [tensor for rank, (_, (tensor,)) in enumerate(members) if rank != target]
    (total,) = members[target][1]
    total.copy_(first)
    for tensor in others:
        total += tensor
    return [tensor for _, (tensor,) in members]


_RESULTS = {
    "all_to_all": _exchanged, "all_gather": _gathered, "sum": _summed, "broadcast": _brought, "reduce": _reduced,
    "reduce_scatter": _scattered,
}  # fmt: skip
"""Functions by kind, from the calls and tensors of all members to the result of each."""


def _compare(
    name: str,
    mine: tuple[int, CollectiveCall, tuple[Tensor, ...]],
    theirs: tuple[int, CollectiveCall, tuple[Tensor, ...]],
) -> None:
    """Raise `MessageMismatch` unless two members start the same collective and agree on what they exchange."""
    (a, call, tensors), (b, other, others) = mine, theirs
    place = f"communicator {name}, collective {call.number}"
    if (call.kind, call.label, call.root) != (other.kind, other.label, other.root):
        raise MessageMismatch(
            f"{place}: rank {a} starts {call_name(call)} where rank {b} has started {call_name(other)}"
        )
    skip = 1 if call.kind == "all_to_all" else 0
    shapes = [[describe(t.shape[skip:], t.dtype) for t in each] for each in (tensors, others)]
    if shapes[0] != shapes[1]:
        raise MessageMismatch(
            f"{place} ({call_name(call)}): rank {a} brings {shapes[0]} where rank {b} brings {shapes[1]}"
        )
    if call.kind != "all_to_all":
        return
    directions = ((a, b, call.send[b], other.receive[a]), (b, a, other.send[a], call.receive[b]))
    for source, target, rows, wanted in directions:
        if rows != wanted:
            raise MessageMismatch(
                f"{place} ({call_name(call)}): rank {source} sends {rows} rows to rank {target}, which expects {wanted}"
            )


class Ahead(NamedTuple):
    """Work on a `SideStream`.

    result: the work's tensors, readable after `joined`. done: event at the end of the work; None on a CPU.
    """

    result: Any
    done: DeviceEvent | None


class SideStream:
    """Runs copies on one side stream per GPU, made at its first use.

    name: of the lane. high: a stream of high priority.
    """

    def __init__(self, name: str, high: bool = False) -> None:
        self._name, self._high = name, high
        self._streams: dict[ComputeDevice, DeviceStream] = {}

    def run(self, work: Callable[[], Any], taken: Iterable[Tensor]) -> Ahead:
        """Start ``work``, which reads the tensors ``taken``, of any shape, in their present state; returns at once."""
        taken = list(taken)
        device = next((each for tensor in taken if (each := device_for(tensor.device)).holds(tensor)), None)
        if device is None:
            return Ahead(work(), None)
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = device.stream(self._name, self._high)
        device.record().wait(side)
        with device.on(side):
            result = work()
        for tensor in taken:
            device.used_by(tensor, side)  # its memory must not be reused before the copies have read it
        return Ahead(result, device.record(side))


def joined(ahead: Ahead, tensors: Iterable[Tensor]) -> None:
    """Let the current stream wait for work on a side stream. tensors: the results [...] in use next."""
    if ahead.done is None:
        return
    for tensor in tensors:
        device = device_for(tensor.device)
        here = device.current()
        ahead.done.wait(here)
        device.used_by(tensor, here)  # made on the side stream, freed by users of this one
