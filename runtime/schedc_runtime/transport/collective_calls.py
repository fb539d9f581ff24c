"""What members of a group say of a collective that they start: the protocol, checks of splits, counts of bytes.

A collective is started, and waited for once; what it gives comes from `wait`. Members start the same collectives in
the same order: the n-th of one member meets the n-th of every other, which makes (name, number) its identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from schedc_runtime.transport.base import Handle, MessageMismatch

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

    def close(self) -> None:
        """Give up what is under way, which wakes members that wait for this one.

        Over torch.distributed the group is gone then; in one process the members begin anew.
        """
        ...


def ordered_sum(parts: Tensor) -> Tensor:
    """[members, ...] to [...]: added one member after the other, so that the bits depend on nothing else."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class CollectiveCall(NamedTuple):
    """What a member says of a collective that it starts. send, receive: rows by tensor and member."""

    kind: str
    label: str
    number: int
    send: tuple[tuple[int, ...], ...] = ()
    receive: tuple[tuple[int, ...], ...] = ()


def checked_call(
    me: Communicator, label: str, tensors: Sequence[Tensor], send: Splits, receive: Splits
) -> CollectiveCall:
    """Check an all-to-all's splits against its tensors, and count its bytes."""
    call = CollectiveCall(
        "all_to_all", label, me.issued, per_tensor(send, len(tensors)), per_tensor(receive, len(tensors))
    )
    for splits in (*call.send, *call.receive):
        if len(splits) != me.size:
            raise MessageMismatch(f"{where(me, call)}: splits for {len(splits)} members in a group of {me.size}")
    for tensor, splits in zip(tensors, call.send, strict=True):
        if tensor.shape[0] != sum(splits):
            raise MessageMismatch(
                f"{where(me, call)}: {tensor.shape[0]} rows to send where the splits have {sum(splits)}"
            )
        row = row_bytes(tensor)
        count_sent(me, [count * row for count in splits])
    return call


def per_tensor(splits: Splits, tensors: int) -> tuple[tuple[int, ...], ...]:
    """Splits of every tensor, where one list may stand for all."""
    shared = [count for count in splits if isinstance(count, int)]
    if len(shared) == len(splits):
        return (tuple(shared),) * tensors
    return tuple(tuple(each) for each in splits if not isinstance(each, int))


def count_sent(me: Communicator, given: Sequence[int]) -> None:
    """Add the bytes given to each member."""
    for member, count in enumerate(given):
        me.sent[member] += count


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row, also where there are none."""
    return tensor.element_size() * prod(tensor.shape[1:])


def shares(elements: int, members: int) -> list[int]:
    """How many elements of a sum each member adds up; they differ by one at the most."""
    least, more = divmod(elements, members)
    return [least + (member < more) for member in range(members)]


def count_sum(me: Communicator, tensor: Tensor) -> None:
    """A sum gives each member its share of the summands, and then everyone one's own share of the sums."""
    parts = shares(tensor.numel(), me.size)
    count_sent(me, [(part + parts[0]) * tensor.element_size() for part in parts])


def what(call: CollectiveCall) -> str:
    """A collective as messages name it."""
    return f"{call.kind} `{call.label}`" if call.label else call.kind


def where(me: Communicator, call: CollectiveCall) -> str:
    """Which collective of whom."""
    return f"communicator {me.name}, collective {call.number} ({what(call)}), rank {me.rank} of {me.size}"
