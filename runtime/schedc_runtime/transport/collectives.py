"""Collectives of a group of ranks: torch.distributed, all ranks in one process, or a group of one.

A collective is started, and waited for once; what it gives comes from `wait`. Members start the same collectives in
the same order: the n-th of one member meets the n-th of every other, which makes (name, number) its identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from schedc_runtime.transport.base import Handle, MessageMismatch, TransportError, describe
from schedc_runtime.transport.distributed import plainly

Splits = Sequence[int] | Sequence[Sequence[int]]
"""Rows for each member, in their order: one list for all tensors of a call, or one list for each tensor."""


class Communicator(Protocol):
    """One member's end of a group of ranks.

    name: says in messages which group this is. rank, size: this member and how many there are.
    cooperative: True if `wait` cannot block: the caller must come back later as long as `ready` says no.
    issued: how many collectives this member has started.
    sent: bytes of payload given to each member so far, itself included.

    Tensors given to a collective must not change before it has been waited for. ``label`` is for messages; members
    must agree on it.
    """

    name: str
    rank: int
    size: int
    cooperative: bool
    issued: int
    sent: list[int]

    def all_to_all(self, tensors: Sequence[Tensor], send: Splits, receive: Splits, label: str = "") -> Handle:
        """Move rows of every tensor, [sum(send), ...] to [sum(receive), ...], rows of member 0 first.

        All tensors travel as one collective. `wait` gives a tuple of tensors of the same dtypes.
        """
        ...

    def all_gather(self, tensor: Tensor, label: str = "") -> Handle:
        """Everyone's tensor of one shape: `wait` gives [size, ...]."""
        ...

    def sum(self, tensor: Tensor, label: str = "") -> Handle:
        """The sum over all members, added in ascending order of members whatever the transport: `wait` gives [...].

        Over torch.distributed the second half is started by `wait`: members must wait in the same place among
        their starts.
        """
        ...

    def ready(self, handle: Handle) -> bool:
        """Whether `wait` would return without giving control to another member."""
        ...

    def wait(self, handle: Handle) -> Any:
        """Block until the collective is complete, and give its result; once for every handle."""
        ...


class SoloCommunicator:
    """A group of one: every collective is complete when it starts."""

    cooperative = False

    def __init__(self, name: str = "solo") -> None:
        self.name, self.rank, self.size, self.issued, self.sent = name, 0, 1, 0, [0]

    def all_to_all(self, tensors: Sequence[Tensor], send: Splits, receive: Splits, label: str = "") -> _Done:
        calls = _call(self, label, tensors, send, receive)
        if calls.send != calls.receive:
            raise MessageMismatch(f"{_where(self, calls)}: sends {calls.send} to itself and receives {calls.receive}")
        return self._start(tuple(tensors))

    def all_gather(self, tensor: Tensor, label: str = "") -> _Done:
        return self._start(tensor.unsqueeze(0))

    def sum(self, tensor: Tensor, label: str = "") -> _Done:
        return self._start(tensor)

    def ready(self, handle: _Done) -> bool:
        return True

    def wait(self, handle: _Done) -> Any:
        return handle.result

    def _start(self, result: Any) -> _Done:
        self.issued += 1
        return _Done(result)


class TorchCommunicator:
    """The ranks of a process group of torch.distributed: gloo between CPU processes, NCCL between GPUs.

    timeout: seconds that one wait may take. gloo raises after it; NCCL has its own watchdog.
    """

    cooperative = False

    def __init__(self, group: dist.ProcessGroup, timeout: float, name: str = "group") -> None:
        self.name, self.rank, self.size = name, dist.get_rank(group), dist.get_world_size(group)
        self.issued, self.sent = 0, [0] * self.size
        self._group, self._timeout = group, timedelta(seconds=timeout)

    def all_to_all(self, tensors: Sequence[Tensor], send: Splits, receive: Splits, label: str = "") -> _Started:
        call = _call(self, label, tensors, send, receive)
        packed, unpack = _as_bytes(tensors, call)
        buffer = packed.new_empty(sum(unpack.sizes))
        started = self._start(call, dist.all_to_all_single, buffer, packed, unpack.sizes, unpack.sent)
        return started._replace(finish=lambda: unpack(buffer))

    def all_gather(self, tensor: Tensor, label: str = "") -> _Started:
        call = _Call("all_gather", label, self.issued)
        _count(self, [tensor.nbytes] * self.size)
        sent = tensor.contiguous()
        gathered = sent.new_empty(self.size, *sent.shape)
        targets = [_bytes(gathered[member]) for member in range(self.size)]
        started = self._start(call, dist.all_gather, targets, _bytes(sent))
        return started._replace(finish=lambda: gathered)

    def sum(self, tensor: Tensor, label: str = "") -> _Started:
        call = _Call("sum", label, self.issued)
        shares = [len(part) for part in torch.empty(tensor.numel()).tensor_split(self.size)]
        mine = shares[self.rank]
        received = tensor.new_empty(self.size, mine)
        started = self._start(
            call, dist.all_to_all_single, _bytes(received), _bytes(tensor.contiguous()),
            [mine * tensor.element_size()] * self.size, [share * tensor.element_size() for share in shares],
        )  # fmt: skip
        _count(self, [share * tensor.element_size() for share in shares])
        return started._replace(finish=lambda: self._gather_sums(call, received, shares, tensor.shape))

    def ready(self, handle: _Started) -> bool:
        return True

    def wait(self, handle: _Started) -> Any:
        if not handle.work:
            raise RuntimeError(f"{_where(self, handle.call)}: waited for twice")
        try:
            handle.work.pop().wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(f"{_where(self, handle.call)}: {plainly(error)}") from None
        return handle.finish()

    def _gather_sums(self, call: _Call, received: Tensor, shares: list[int], shape: torch.Size) -> Tensor:
        """The second half of a sum: add this member's share, and exchange the sums. Shares differ by one at most."""
        width = max(shares)
        mine = received.new_zeros(width)
        mine[: shares[self.rank]] = ordered_sum(received)
        gathered = mine.new_empty(self.size, width)
        _count(self, [mine.nbytes] * self.size)
        started = self._start(call, dist.all_gather, [_bytes(row) for row in gathered], _bytes(mine), again=True)
        self.wait(started._replace(finish=lambda: None))
        return torch.cat([row[:share] for row, share in zip(gathered, shares, strict=True)]).view(shape)

    def _start(self, call: _Call, function: Any, *arguments: Any, again: bool = False) -> _Started:
        try:
            work = function(*arguments, group=self._group, async_op=True)
        except RuntimeError as error:
            raise TransportError(f"{_where(self, call)}: {plainly(error)}") from None
        self.issued += not again
        return _Started(call, [work], arguments)


class InProcessCommunicators:
    """A group of ``size`` members in one process, without threads; `member` gives each its end.

    A collective is complete when every member has started its own of the same number. Kinds, labels, splits, shapes
    and dtypes are checked against each other; a mismatch raises where the later member starts, and names both.
    """

    def __init__(self, size: int, name: str = "group") -> None:
        self.size, self.name = size, name
        self._meetings: dict[int, _Meeting] = {}
        self._members = [InProcessCommunicator(rank, self) for rank in range(size)]

    def member(self, rank: int) -> InProcessCommunicator:
        return self._members[rank]

    def unmatched(self) -> int:
        """Number of collectives that some members have started and others not."""
        return len(self._meetings)

    def join(self, member: InProcessCommunicator, call: _Call, tensors: tuple[Tensor, ...]) -> _Meeting:
        meeting = self._meetings.setdefault(call.number, _Meeting())
        for other, (theirs, brought) in meeting.present.items():
            _compare(self.name, (member.rank, call, tensors), (other, theirs, brought))
        meeting.present[member.rank] = call, tensors
        if len(meeting.present) == self.size:
            del self._meetings[call.number]
            meeting.complete(self.size)
        return meeting


class InProcessCommunicator:
    """One member's end of `InProcessCommunicators`."""

    cooperative = True

    def __init__(self, rank: int, hub: InProcessCommunicators) -> None:
        self.name, self.rank, self.size = hub.name, rank, hub.size
        self.issued, self.sent = 0, [0] * hub.size
        self._hub = hub

    def all_to_all(self, tensors: Sequence[Tensor], send: Splits, receive: Splits, label: str = "") -> _Joined:
        return self._join(_call(self, label, tensors, send, receive), tuple(tensors))

    def all_gather(self, tensor: Tensor, label: str = "") -> _Joined:
        _count(self, [tensor.nbytes] * self.size)
        return self._join(_Call("all_gather", label, self.issued), (tensor,))

    def sum(self, tensor: Tensor, label: str = "") -> _Joined:
        _count(self, [tensor.nbytes] * self.size)
        return self._join(_Call("sum", label, self.issued), (tensor,))

    def ready(self, handle: _Joined) -> bool:
        return handle.meeting.results is not None

    def wait(self, handle: _Joined) -> Any:
        results = handle.meeting.results
        if results is None:
            raise RuntimeError(
                f"{_where(self, handle.call)}: waited for before all have started it; an in-process rank must return "
                "instead"
            )
        if self.rank not in results:
            raise RuntimeError(f"{_where(self, handle.call)}: waited for twice")
        return results.pop(self.rank)

    def _join(self, call: _Call, tensors: tuple[Tensor, ...]) -> _Joined:
        self.issued += 1
        return _Joined(call, self._hub.join(self, call, tensors))


def ordered_sum(parts: Tensor) -> Tensor:
    """[members, ...] to [...]: added one member after the other, so that the bits depend on nothing else."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _Call(NamedTuple):
    """What a member says of a collective that it starts. send, receive: rows by tensor and member."""

    kind: str
    label: str
    number: int
    send: tuple[tuple[int, ...], ...] = ()
    receive: tuple[tuple[int, ...], ...] = ()


class _Done(NamedTuple):
    result: Any


class _Started(NamedTuple):
    """work: what torch gave, taken out by the wait. kept: the tensors in use, which must outlive it."""

    call: _Call
    work: list[Any]
    kept: tuple[Any, ...]
    finish: Any = None


class _Joined(NamedTuple):
    call: _Call
    meeting: _Meeting


@dataclass(slots=True)
class _Meeting:
    """One collective of a process: who has started it with what, and each member's result once all have."""

    present: dict[int, tuple[_Call, tuple[Tensor, ...]]] = field(default_factory=dict)
    results: dict[int, Any] | None = None

    def complete(self, size: int) -> None:
        members = [self.present[rank] for rank in range(size)]
        # All results at once: a member that has waited may write into what it sent.
        self.results = dict(enumerate(_RESULTS[members[0][0].kind](members)))
        self.present.clear()


def _exchanged(members: list[tuple[_Call, tuple[Tensor, ...]]]) -> list[Any]:
    cut = [
        [torch.split(tensor, list(splits)) for tensor, splits in zip(tensors, call.send, strict=True)]
        for call, tensors in members
    ]
    width = len(cut[0])
    return [
        tuple(torch.cat([sender[position][target] for sender in cut]) for position in range(width))
        for target in range(len(members))
    ]


def _gathered(members: list[tuple[_Call, tuple[Tensor, ...]]]) -> list[Any]:
    return [torch.stack([tensor for _, (tensor,) in members]) for _ in members]


def _summed(members: list[tuple[_Call, tuple[Tensor, ...]]]) -> list[Any]:
    parts = torch.stack([tensor for _, (tensor,) in members])
    return [ordered_sum(parts) for _ in members]


_RESULTS = {"all_to_all": _exchanged, "all_gather": _gathered, "sum": _summed}
"""By kind: every member's result, from what all members brought."""


def _call(me: Communicator, label: str, tensors: Sequence[Tensor], send: Splits, receive: Splits) -> _Call:
    """Check an all-to-all's splits against its tensors, and count its bytes."""
    call = _Call("all_to_all", label, me.issued, _per_tensor(send, len(tensors)), _per_tensor(receive, len(tensors)))
    for splits in (*call.send, *call.receive):
        if len(splits) != me.size:
            raise MessageMismatch(f"{_where(me, call)}: splits for {len(splits)} members in a group of {me.size}")
    for tensor, splits in zip(tensors, call.send, strict=True):
        if tensor.shape[0] != sum(splits):
            raise MessageMismatch(
                f"{_where(me, call)}: {tensor.shape[0]} rows to send where the splits have {sum(splits)}"
            )
        row = _row_bytes(tensor)
        _count(me, [count * row for count in splits])
    return call


def _per_tensor(splits: Splits, tensors: int) -> tuple[tuple[int, ...], ...]:
    shared = [count for count in splits if isinstance(count, int)]
    if len(shared) == len(splits):
        return (tuple(shared),) * tensors
    return tuple(tuple(each) for each in splits if not isinstance(each, int))


def _count(me: Communicator, given: Sequence[int]) -> None:
    for member, count in enumerate(given):
        me.sent[member] += count


def _row_bytes(tensor: Tensor) -> int:
    return (
        tensor.element_size() * tensor[:1].numel() if tensor.shape[0] else tensor.new_empty(1, *tensor.shape[1:]).nbytes
    )


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's storage as bytes: gloo knows few dtypes, and the bits are what has to arrive."""
    return tensor.reshape(-1).view(torch.uint8)


class _Unpack(NamedTuple):
    """How the bytes of an all-to-all become tensors again. sizes, sent: bytes from and to each member."""

    like: list[tuple[torch.dtype, tuple[int, ...], int]]
    receive: tuple[tuple[int, ...], ...]
    sizes: list[int]
    sent: list[int]

    def __call__(self, buffer: Tensor) -> tuple[Tensor, ...]:
        pieces = [[rows[member] * row for rows, (_, _, row) in zip(self.receive, self.like, strict=True)]
                  for member in range(len(self.sizes))]  # fmt: skip
        width = len(self.like)
        parts = torch.split(buffer, [size for member in pieces for size in member])
        return tuple(
            (buffer if width == 1 else torch.cat(parts[position::width])).view(dtype).view(-1, *shape)
            if sum(self.receive[position]) and row
            else torch.empty(sum(self.receive[position]), *shape, dtype=dtype, device=buffer.device)
            for position, (dtype, shape, row) in enumerate(self.like)
        )


def _as_bytes(tensors: Sequence[Tensor], call: _Call) -> tuple[Tensor, _Unpack]:
    """All tensors in one buffer of bytes, member by member; a single tensor is not copied."""
    rows = [_row_bytes(tensor) for tensor in tensors]
    members = range(len(call.send[0]))
    sent = [sum(splits[m] * row for splits, row in zip(call.send, rows, strict=True)) for m in members]
    sizes = [sum(splits[m] * row for splits, row in zip(call.receive, rows, strict=True)) for m in members]
    like = [(tensor.dtype, tuple(tensor.shape[1:]), row) for tensor, row in zip(tensors, rows, strict=True)]
    unpack = _Unpack(like, call.receive, sizes, sent)
    flat = [_bytes(tensor.contiguous()) for tensor in tensors]
    if len(flat) == 1:
        return flat[0], unpack
    ends = [list(accumulate((count * row for count in splits), initial=0))
            for splits, row in zip(call.send, rows, strict=True)]  # fmt: skip
    return torch.cat(
        [piece[end[m] : end[m + 1]] for m in members for piece, end in zip(flat, ends, strict=True)]
    ), unpack


def _compare(
    name: str, mine: tuple[int, _Call, tuple[Tensor, ...]], theirs: tuple[int, _Call, tuple[Tensor, ...]]
) -> None:
    """Raise unless two members mean the same collective and agree on what they give each other."""
    (a, call, tensors), (b, other, brought) = mine, theirs
    where = f"communicator {name}, collective {call.number}"
    if (call.kind, call.label) != (other.kind, other.label):
        raise MessageMismatch(f"{where}: rank {a} starts {_what(call)} where rank {b} has started {_what(other)}")
    skip = 1 if call.kind == "all_to_all" else 0
    shapes = [[describe(t.shape[skip:], t.dtype) for t in each] for each in (tensors, brought)]
    if shapes[0] != shapes[1]:
        raise MessageMismatch(f"{where} ({_what(call)}): rank {a} brings {shapes[0]} where rank {b} brings {shapes[1]}")
    for position, (sent, received, sent_back, expected) in enumerate(
        zip(call.send, call.receive, other.send, other.receive, strict=True)
    ):
        for source, target, given, wanted in ((a, b, sent[b], expected[a]), (b, a, sent_back[a], received[b])):
            if given != wanted:
                raise MessageMismatch(
                    f"{where} ({_what(call)}): rank {source} sends {given} rows of tensor {position} to rank "
                    f"{target}, which expects {wanted}"
                )


def _what(call: _Call) -> str:
    return f"{call.kind} `{call.label}`" if call.label else call.kind


def _where(me: Communicator, call: _Call) -> str:
    return f"communicator {me.name}, collective {call.number} ({_what(call)}), rank {me.rank} of {me.size}"
