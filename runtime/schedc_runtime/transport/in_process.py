"""Transport between ranks of one process: messages are copies, and a rank that would block returns."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from schedc_runtime.transport.base import MessageMismatch, Tensors, Transfer, describe


@dataclass(slots=True)
class _Pending:
    transfer: Transfer
    done: bool = False


class InProcessNetwork:
    """The channels between ``ranks`` ranks of one process, by communicator. `transport` returns the end of each rank.

    It has the strictest semantics of real networks, so that what runs here runs anywhere. A send completes only when
    its receive has been posted. Messages of a channel meet in order, without tags. There are no threads: runs are
    deterministic. Several ranks may share one GPU, where NCCL refuses to run; copies go to the current stream.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._channels: defaultdict[tuple[int, int, int], deque[_Pending]] = defaultdict(deque)
        """By sender, receiver and communicator: transfers without their counterpart, oldest first, all of one end."""

    def transport(self, rank: int) -> InProcessTransport:
        return InProcessTransport(rank, self)

    def post(self, rank: int, batch: Sequence[Transfer]) -> list[_Pending]:
        channels, posted = self._channels, []
        for transfer in batch:
            peer, receives, tensors, communicator = transfer
            waiting = channels[(peer, rank, communicator) if receives else (rank, peer, communicator)]
            pending = _Pending(transfer)
            posted.append(pending)
            if not waiting or waiting[0].transfer.receive is receives:
                waiting.append(pending)
                continue
            other = waiting.popleft()
            if receives:
                _copy(peer, rank, other.transfer.tensors, tensors)
            else:
                _copy(rank, peer, tensors, other.transfer.tensors)
            other.done = pending.done = True
        return posted

    def unmatched(self) -> int:
        """Number of messages with only one end posted."""
        return sum(map(len, self._channels.values()))


class InProcessTransport:
    """One rank's end of an `InProcessNetwork`."""

    cooperative = True

    def __init__(self, rank: int, network: InProcessNetwork) -> None:
        self.rank = rank
        self._network = network

    def post(self, batch: Sequence[Transfer]) -> list[_Pending]:
        return self._network.post(self.rank, batch)

    def ready(self, handle: _Pending) -> bool:
        return handle.done

    def wait(self, handle: _Pending) -> None:
        if not handle.done:
            raise RuntimeError("waited for a message that is not ready: an in-process rank must return instead")

    def close(self) -> None:
        return


def _copy(source: int, target: int, sent: Tensors, buffers: Tensors) -> None:
    if len(sent) != len(buffers):
        raise _mismatch(source, target, sent, buffers)
    for tensor, buffer in zip(sent, buffers, strict=True):
        if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype:
            raise _mismatch(source, target, sent, buffers)
        buffer.copy_(tensor)


def _mismatch(source: int, target: int, sent: Tensors, buffers: Tensors) -> MessageMismatch:
    return MessageMismatch(
        f"rank {source} sends {_list(sent)} to rank {target}, which has posted a receive of {_list(buffers)}"
    )


def _list(tensors: Tensors) -> str:
    return ", ".join(describe(tensor.shape, tensor.dtype) for tensor in tensors) or "nothing"
