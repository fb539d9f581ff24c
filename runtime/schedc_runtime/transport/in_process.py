"""Transport between ranks of one process: messages are copies, and a rank that would block returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter, methodcaller

import torch

from schedc_runtime.transport.base import MessageForm, MessageMismatch, Spec, Tensors, Transfer, describe


class _End:
    """One end of a message, posted. done: whether the other end has been posted, too, and the message is copied."""

    # Two are made for each message, so that there is no `__init__`: it would take as long as posting an end.
    receive: bool
    tensors: Tensors
    form: MessageForm | None
    done = False


class _Channel:
    """The messages of one sender, receiver and communicator."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.ends: deque[_End] = deque()
        """Ends without their counterpart, oldest first: all sends, or all receives."""

    def post(self, receive: bool, tensors: Tensors, form: MessageForm | None) -> _End:
        """Post an end, and move the message if the other end is here. Arguments are as of a `Transfer`."""
        end = _End()
        end.receive, end.tensors, end.form = receive, tensors, form
        ends = self.ends
        if not ends or ends[0].receive is receive:
            ends.append(end)
            return end
        other = ends.popleft()
        sent, received = (other, end) if receive else (end, other)
        if form is None or form is not other.form:
            self._check(sent, received)
        if received.form is None:
            for tensor, buffer in zip(sent.tensors, received.tensors, strict=True):
                buffer.copy_(tensor)
        else:
            received.tensors = tuple(map(_copied, sent.tensors))
        other.done = end.done = True
        return end

    def _check(self, sent: _End, received: _End) -> None:
        """Compare the ends. One form for both would mean that the tensors have been checked against it."""
        carried = [(tensor.shape, tensor.dtype) for tensor in sent.tensors]
        form = received.form
        expected = list(form.specs) if form else [(tensor.shape, tensor.dtype) for tensor in received.tensors]
        if carried != expected:
            raise MessageMismatch(
                f"rank {self.source} sends {_list(carried)} to rank {self.target},"
                f" which has posted a receive of {_list(expected)}"
            )


class InProcessNetwork:
    """The channels between ``ranks`` ranks of one process, by communicator. `transport` returns the end of each rank.

    It has the strictest semantics of real networks, so that what runs here runs anywhere. A send completes only when
    its receive has been posted. Messages of a channel meet in order, without tags. There are no threads: runs are
    deterministic. Several ranks may share one GPU, where NCCL refuses to run; copies go to the current stream.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._channels: dict[tuple[int, int, int], _Channel] = {}
        """By sender, receiver and communicator."""

    def transport(self, rank: int) -> InProcessTransport:
        return InProcessTransport(rank, self)

    def channel(self, source: int, target: int, communicator: int) -> _Channel:
        key = source, target, communicator
        if (channel := self._channels.get(key)) is None:
            channel = self._channels[key] = _Channel(source, target)
        return channel

    def unmatched(self) -> int:
        """Number of messages with only one end posted."""
        return sum(len(channel.ends) for channel in self._channels.values())


class InProcessTransport:
    """One rank's end of an `InProcessNetwork`."""

    cooperative = True
    ready = staticmethod(attrgetter("done"))  # a call of C, where a method takes three times as long

    def __init__(self, rank: int, network: InProcessNetwork) -> None:
        self.rank = rank
        self._network = network

    def post(self, batch: Sequence[Transfer]) -> list[_End]:
        return [self.channel(x.peer, x.receive, x.communicator).post(x.receive, x.tensors, x.form) for x in batch]

    def channel(self, peer: int, receive: bool, communicator: int) -> _Channel:
        """The channel of a `Transfer`. Its ``post`` takes one end without the list, which costs half as much."""
        source, target = (peer, self.rank) if receive else (self.rank, peer)
        return self._network.channel(source, target, communicator)

    def wait(self, handle: _End) -> None:
        if not handle.done:
            raise RuntimeError("waited for a message that is not ready: an in-process rank must return instead")

    def close(self) -> None:
        return


_copied = methodcaller("clone", memory_format=torch.contiguous_format)
"""A new contiguous tensor with the values of a detached one, of its shape. A function of Python would take longer."""


def _list(specs: Sequence[Spec]) -> str:
    return ", ".join(describe(*spec) for spec in specs) or "nothing"
