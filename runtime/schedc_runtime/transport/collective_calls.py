"""The protocol of collectives in a group of ranks, with checks of splits and counts of bytes.

A member starts a collective and waits for it once; `wait` returns the result. Members start the same collectives in
the same order: the n-th of one member meets the n-th of every other. (name, number) therefore identifies a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from schedc_runtime.transport.base import Handle, MessageMismatch

Splits = Sequence[int]
"""[members] rows for each member, the same of every tensor of a call."""


class Communicator(Protocol):
    """One member's end of a group of ranks.

    name: name of the group in messages. rank: number of this member. size: number of members.
    cooperative: True if `wait` cannot block: the caller must come back later until `ready` is true.
    issued: number of collectives started by this member.
    sent: [members] bytes of payload sent to each member so far, itself included.

    Tensors given to a collective must not change before `wait`. Labels are for messages; members must agree on them.
    """

    name: str
    rank: int
    size: int
    cooperative: bool
    issued: int
    sent: list[int]

    def all_to_all(self, tensors: Sequence[Tensor], send: Splits, receive: Splits, label: str = "") -> Handle:
        """Move rows of every tensor, [sum(send), ...] to [sum(receive), ...], rows of member 0 first.

        All tensors travel as one collective. `wait` returns a tuple of tensors of the same dtypes.
        """
        ...

    def all_gather(self, tensor: Tensor, label: str = "") -> Handle:
        """Gather the tensors [...] of all members, which have one shape: `wait` returns [size, ...]."""
        ...

    def reduce_scatter(self, tensor: Tensor, label: str = "") -> Handle:
        """Sum the tensors [...] of all members in their order; each member keeps its share.

        `wait` returns [`shares` of member 0] elements in one row: this member's share, then zeros up to the longest
        share. `all_gather` of it and `whole_of` complete the sum.
        """
        ...

    def sum(self, tensor: Tensor, label: str = "") -> Handle:
        """Sum the tensors [...] of all members in their order, on every transport: `wait` returns [...].

        Over torch.distributed `wait` starts the second half. Members must therefore wait at the same point among their
        starts.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int, label: str = "") -> Handle:
        """Copy the tensor [...] of member ``source`` into the tensors of all other members, of the same shape.

        Tensors are contiguous. `wait` returns this member's.
        """
        ...

    def reduce(self, tensor: Tensor, target: int, label: str = "") -> Handle:
        """Sum the tensors [...] of all members but ``target``, in their order, into that of ``target``.

        Tensors are contiguous. `wait` returns this member's tensor. Over torch.distributed it starts the second half,
        as that of `sum` does. No member holds more than its own tensor and as many bytes beside it.
        """
        ...

    def ready(self, handle: Handle) -> bool:
        """Whether `wait` would return without giving control to another member."""
        ...

    def wait(self, handle: Handle) -> Any:
        """Block until the collective is complete, and return its result. Once per handle."""
        ...

    def close(self) -> None:
        """Give up the collectives in flight, and so wake waiting members.

        Over torch.distributed this destroys the group. In one process the members begin anew.
        """
        ...


def ordered_sum(parts: Tensor) -> Tensor:
    """[members, ...] summed to [...], one member after the other: the bits depend on nothing else."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class CollectiveCall(NamedTuple):
    """A member's call of a collective.

    send, receive: [members] rows. root: the member whose tensor is sent or summed into; -1 for none.
    """

    kind: str
    label: str
    number: int
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    root: int = -1


def checked_call(
    me: Communicator, label: str, tensors: Sequence[Tensor], send: Splits, receive: Splits
) -> CollectiveCall:
    """Check an all-to-all's splits against its tensors, and count its bytes."""
    call = CollectiveCall("all_to_all", label, me.issued, tuple(send), tuple(receive))
    for splits in (send, receive):
        if len(splits) != me.size:
            raise MessageMismatch(f"{call_place(me, call)}: splits for {len(splits)} members in a group of {me.size}")
    for tensor in tensors:
        if tensor.shape[0] != sum(send):
            raise MessageMismatch(
                f"{call_place(me, call)}: {tensor.shape[0]} rows to send where the splits have {sum(send)}"
            )
    row = sum(map(row_bytes, tensors))
    count_sent(me, [count * row for count in send])
    return call


def count_sent(me: Communicator, sent: Sequence[int]) -> None:
    """Count bytes ``sent`` [members] to each member."""
    for member, count in enumerate(sent):
        me.sent[member] += count


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row of [rows, ...], also if there are no rows."""
    return tensor.element_size() * prod(tensor.shape[1:])


def shares(elements: int, members: int) -> list[int]:
    """[members] number of elements of a sum that each member adds up; they differ by at most one."""
    least, more = divmod(elements, members)
    return [least + (member < more) for member in range(members)]


def padded_share(summed: Tensor, longest: int) -> Tensor:
    """[longest] the elements of a member's share, then zeros."""
    if summed.numel() == longest:
        return summed
    share = summed.new_zeros(longest)
    share[: summed.numel()] = summed
    return share


def whole_of(gathered: Tensor, elements: int) -> Tensor:
    """[elements] a sum from the shares of its members. gathered: [members, longest share], as `all_gather` returns."""
    parts = shares(elements, gathered.shape[0])
    if parts[0] * len(parts) == elements:
        return gathered.view(-1)
    return torch.cat([row[:part] for row, part in zip(gathered, parts, strict=True)])


def count_sum(me: Communicator, tensor: Tensor) -> None:
    """Count the bytes of a sum: each member gets its share of the summands, then everyone's share of the sums."""
    parts = shares(tensor.numel(), me.size)
    count_sent(me, [(part + parts[0]) * tensor.element_size() for part in parts])


def count_broadcast(me: Communicator, tensor: Tensor, source: int) -> None:
    """Count the bytes of a broadcast: those of the source's tensor to each other member."""
    if me.rank == source:
        count_sent(me, [tensor.nbytes * (member != source) for member in range(me.size)])


def count_reduce(me: Communicator, tensor: Tensor, target: int) -> None:
    """Count the bytes of a reduction: a share to each member that adds it up, then this member's share of the sums."""
    if me.rank != target:
        parts = [part * tensor.element_size() for part in shares(tensor.numel(), me.size)]
        parts[target] += parts[me.rank]
        count_sent(me, parts)


def call_name(call: CollectiveCall) -> str:
    """The name of a collective in messages."""
    name = f"{call.kind} `{call.label}`" if call.label else call.kind
    return name if call.root < 0 else f"{name} at member {call.root}"


def call_place(me: Communicator, call: CollectiveCall) -> str:
    """A prefix of messages: group, collective and member."""
    return f"communicator {me.name}, collective {call.number} ({call_name(call)}), rank {me.rank} of {me.size}"
