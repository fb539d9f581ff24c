"""Transport between ranks of one process: messages are copies, and a rank that would block returns."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from schedc_runtime.transport.base import MessageMismatch, Transfer, describe


@dataclass(slots=True)
class _Pending:
    transfer: Transfer
    done: bool = False


@dataclass(slots=True)
class _Channel:
    """One direction between two ranks: transfers without their counterpart, oldest first."""

    sends: deque[_Pending] = field(default_factory=deque)
    receives: deque[_Pending] = field(default_factory=deque)


class InProcessNetwork:
    """The channels between ``ranks`` ranks of one process, by communicator. `transport` returns the end of each rank.

    It has the strictest semantics of real networks, so that what runs here runs anywhere. A send completes only when
    its receive has been posted. Messages of a channel meet in order, without tags. There are no threads: runs are
    deterministic. Several ranks may share one GPU, where NCCL refuses to run; copies go to the current stream.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._channels: defaultdict[tuple[int, int, int], _Channel] = defaultdict(_Channel)

    def transport(self, rank: int) -> InProcessTransport:
        return InProcessTransport(rank, self)

    def post(self, rank: int, transfer: Transfer) -> _Pending:
        source, target = (transfer.peer, rank) if transfer.receive else (rank, transfer.peer)
        channel, pending = self._channels[source, target, transfer.communicator], _Pending(transfer)
        mine, others = (channel.receives, channel.sends) if transfer.receive else (channel.sends, channel.receives)
        if not others:
            mine.append(pending)
            return pending
        other = others.popleft()
        send, receive = (other, pending) if transfer.receive else (pending, other)
        _copy(source, target, send.transfer, receive.transfer)
        send.done = receive.done = True
        return pending

    def unmatched(self) -> int:
        """Number of messages with only one end posted."""
        return sum(len(channel.sends) + len(channel.receives) for channel in self._channels.values())


class InProcessTransport:
    """One rank's end of an `InProcessNetwork`."""

    cooperative = True

    def __init__(self, rank: int, network: InProcessNetwork) -> None:
        self.rank = rank
        self._network = network

    def post(self, batch: Sequence[Transfer]) -> list[_Pending]:
        return [self._network.post(self.rank, transfer) for transfer in batch]

    def ready(self, handle: _Pending) -> bool:
        return handle.done

    def wait(self, handle: _Pending) -> None:
        if not handle.done:
            raise RuntimeError("waited for a message that is not ready: an in-process rank must return instead")

    def close(self) -> None:
        return


def _copy(source: int, target: int, send: Transfer, receive: Transfer) -> None:
    sent = [(tensor.shape, tensor.dtype) for tensor in send.tensors]
    expected = [(tensor.shape, tensor.dtype) for tensor in receive.tensors]
    if sent != expected:
        raise MessageMismatch(
            f"rank {source} sends {_list(sent)} to rank {target}, which has posted a receive of {_list(expected)}"
        )
    for tensor, buffer in zip(send.tensors, receive.tensors, strict=True):
        buffer.copy_(tensor)


def _list(specs: Sequence[tuple[Sequence[int], object]]) -> str:
    return ", ".join(describe(shape, dtype) for shape, dtype in specs) or "nothing"  # type: ignore[arg-type]
