"""Transport between ranks of one process: messages are copies, and a rank that would block returns."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from schedc_runtime.transport.base import MessageForm, MessageMismatch, Spec, Tensors, Transfer, describe


class _End:
    """One end of a message, posted. done: whether the other end has been posted, too, and the message is copied."""

    # Two are made for each message, so that there is no `__init__`: it would take as long as posting an end.
    receive: bool
    tensors: Tensors
    form: MessageForm | None
    done = False


class InProcessNetwork:
    """The channels between ``ranks`` ranks of one process, by communicator. `transport` returns the end of each rank.

    It has the strictest semantics of real networks, so that what runs here runs anywhere. A send completes only when
    its receive has been posted. Messages of a channel meet in order, without tags. There are no threads: runs are
    deterministic. Several ranks may share one GPU, where NCCL refuses to run; copies go to the current stream.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._channels: defaultdict[tuple[int, int, int], deque[_End]] = defaultdict(deque)
        """By sender, receiver and communicator: ends without their counterpart, oldest first, all sends or receives."""

    def transport(self, rank: int) -> InProcessTransport:
        return InProcessTransport(rank, self)

    def post(self, rank: int, batch: Sequence[Transfer]) -> list[_End]:
        channels, posted = self._channels, []
        for peer, receive, tensors, communicator, form in batch:
            end = _End()
            end.receive, end.tensors, end.form = receive, tensors, form
            posted.append(end)
            waiting = channels[(peer, rank, communicator) if receive else (rank, peer, communicator)]
            if not waiting or waiting[0].receive is receive:
                waiting.append(end)
                continue
            other = waiting.popleft()
            if receive:
                _move(peer, rank, other, end)
            else:
                _move(rank, peer, end, other)
            other.done = end.done = True
        return posted

    def unmatched(self) -> int:
        """Number of messages with only one end posted."""
        return sum(map(len, self._channels.values()))


class InProcessTransport:
    """One rank's end of an `InProcessNetwork`."""

    cooperative = True
    ready = staticmethod(attrgetter("done"))  # a call of C, where a method takes three times as long

    def __init__(self, rank: int, network: InProcessNetwork) -> None:
        self.rank = rank
        self._network = network

    def post(self, batch: Sequence[Transfer]) -> list[_End]:
        return self._network.post(self.rank, batch)

    def wait(self, handle: _End) -> None:
        if not handle.done:
            raise RuntimeError("waited for a message that is not ready: an in-process rank must return instead")

    def close(self) -> None:
        return


def _move(source: int, target: int, sent: _End, received: _End) -> None:
    """Copy a message between ranks: into the receiver's buffers, or into tensors made now.

    One form for both ends means that the tensors have been checked against it.
    """
    form = received.form
    if form is None or form is not sent.form:
        carried = [(tensor.shape, tensor.dtype) for tensor in sent.tensors]
        expected = list(form.specs) if form else [(tensor.shape, tensor.dtype) for tensor in received.tensors]
        if carried != expected:
            raise MessageMismatch(
                f"rank {source} sends {_list(carried)} to rank {target},"
                f" which has posted a receive of {_list(expected)}"
            )
    if form is None:
        for tensor, buffer in zip(sent.tensors, received.tensors, strict=True):
            buffer.copy_(tensor)
    else:
        received.tensors = tuple(map(_copied, sent.tensors))


def _copied(tensor: Tensor) -> Tensor:
    """A new contiguous tensor with the values of a detached one, of its shape."""
    return tensor.clone() if tensor.is_contiguous() else tensor.contiguous()


def _list(specs: Sequence[Spec]) -> str:
    return ", ".join(describe(*spec) for spec in specs) or "nothing"
