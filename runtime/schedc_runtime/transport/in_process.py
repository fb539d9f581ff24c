"""Transport between ranks of one process: messages are copies, and a rank that would block returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller

import torch

from schedc_runtime.transport.base import MessageForm, MessageMismatch, Spec, Tensors, Transfer, describe


class _End:
    """One end of a message, posted. done: whether the other end has been posted, too, and the message is copied."""

    # Two are made for each message, so that there is no `__init__`: it would take as long as posting an end.
    tensors: Tensors
    form: MessageForm | None
    done = False


class _Channel:
    """The messages of one sender, receiver and communicator. `send` and `receive` post an end, with a `Transfer`'s
    tensors and form, and move the message if the other end is here."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.sends: deque[_End] = deque()
        """Sends without their receives, oldest first. Empty while `receives` is not."""
        self.receives: deque[_End] = deque()

    def send(self, tensors: Tensors, form: MessageForm | None) -> _End:
        end = _End()
        end.tensors, end.form = tensors, form
        if not self.receives:
            self.sends.append(end)
            return end
        other = self.receives.popleft()
        if form is None or form is not other.form:
            self._fill(end, other)
        else:
            other.tensors = tuple(map(_copied, tensors))
        other.done = end.done = True
        return end

    def receive(self, tensors: Tensors, form: MessageForm | None) -> _End:
        end = _End()
        end.tensors, end.form = tensors, form
        if not self.sends:
            self.receives.append(end)
            return end
        other = self.sends.popleft()
        if form is None or form is not other.form:
            self._fill(other, end)
        else:
            end.tensors = tuple(map(_copied, other.tensors))
        other.done = end.done = True
        return end

    def _fill(self, sent: _End, received: _End) -> None:
        """Move a message whose ends have not been checked against one form."""
        self._check(sent, received)
        if received.form is None:
            for tensor, buffer in zip(sent.tensors, received.tensors, strict=True):
                buffer.copy_(tensor)
        else:
            received.tensors = tuple(map(_copied, sent.tensors))

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
        return sum(len(channel.sends) + len(channel.receives) for channel in self._channels.values())


class InProcessTransport:
    """One rank's end of an `InProcessNetwork`."""

    cooperative = True
    ready = staticmethod(attrgetter("done"))  # a call of C, where a method takes three times as long

    def __init__(self, rank: int, network: InProcessNetwork) -> None:
        self.rank = rank
        self._network = network

    def post(self, batch: Sequence[Transfer]) -> list[_End]:
        return [self.end(x.peer, x.receive, x.communicator)(x.tensors, x.form) for x in batch]

    def end(self, peer: int, receive: bool, communicator: int) -> Callable[[Tensors, MessageForm | None], _End]:
        """What posts a `Transfer`'s tensors and form. A list of one would cost twice as much."""
        source, target = (peer, self.rank) if receive else (self.rank, peer)
        channel = self._network.channel(source, target, communicator)
        return channel.receive if receive else channel.send

    def wait(self, handle: _End) -> None:
        if not handle.done:
            raise RuntimeError("waited for a message that is not ready: an in-process rank must return instead")

    def close(self) -> None:
        return


_copied = methodcaller("clone", memory_format=torch.contiguous_format)
"""A new contiguous tensor with the values of a detached one, of its shape. A function of Python would take longer."""


def _list(specs: Sequence[Spec]) -> str:
    return ", ".join(describe(*spec) for spec in specs) or "nothing"
