"""Transport over torch.distributed: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from schedc_runtime.transport.base import Transfer, TransportError


class _Posted(NamedTuple):
    works: list[Any]
    tensors: tuple[Tensor, ...]
    """Those of a send must outlive it: gloo sends without a copy."""


class Members(NamedTuple):
    """The process group of a communicator. place: the group rank of each of its pipeline ranks."""

    group: dist.ProcessGroup
    place: Mapping[int, int]


class TorchTransport:
    """Sends and receives of one process group, whose group ranks are the pipeline's ranks.

    communicators: the groups of a program's communicators by number. What has no number, or one that is not here, goes
    through the group of all ranks.

    timeout: seconds of the longest wait. gloo raises after it; NCCL has its own watchdog, set by the timeout that
        the group was made with.
    coalesce: post a batch by one call of the group, as NCCL requires.
    """

    cooperative = False

    def __init__(self, group: dist.ProcessGroup, timeout: float, *, coalesce: bool = False) -> None:
        self.rank = dist.get_rank(group)
        self.group = group
        self.communicators: dict[int, Members] = {}
        self._timeout = timedelta(seconds=timeout)
        self._coalesce = coalesce
        self._post_all = self._post_coalesced if coalesce else self._post_each

    def over(self, group: dist.ProcessGroup) -> TorchTransport:
        """A transport over another group, whose waits are limited as here."""
        return TorchTransport(group, self._timeout.total_seconds(), coalesce=self._coalesce)

    def limit_waits(self, seconds: float) -> None:
        """Limit each further wait to so many seconds."""
        self._timeout = timedelta(seconds=seconds)

    def post(self, batch: Sequence[Transfer]) -> list[_Posted]:
        try:
            return self._post_all(batch)
        except RuntimeError as error:
            raise TransportError(plain_text(error)) from None

    def ready(self, handle: _Posted) -> bool:
        return True

    def wait(self, handle: _Posted) -> None:
        try:
            for work in handle.works:
                wait_for(work, self._timeout, on_stream=self._coalesce)
        except RuntimeError as error:
            # The traceback must not keep the works alive: gloo's connections stay open as long as one lives,
            # and closing the connections wakes the other ranks.
            work = None
            handle.works.clear()
            raise TransportError(plain_text(error)) from None

    def close(self) -> None:
        # A group closes with its last reference, and tracebacks may keep this object alive.
        self.communicators.clear()
        del self.group, self._post_all

    def _way(self, transfer: Transfer) -> tuple[dist.ProcessGroup, int]:
        """The process group of a transfer, and the rank of its peer there."""
        if (members := self.communicators.get(transfer.communicator)) is None:
            return self.group, transfer.peer
        return members.group, members.place[transfer.peer]

    def _post_each(self, batch: Sequence[Transfer]) -> list[_Posted]:
        """For gloo: receives first, for a peer that posts the same batch the other way round."""
        posted: list[_Posted | None] = [None] * len(batch)
        for receive in (True, False):
            for position, transfer in enumerate(batch):
                if transfer.receive is receive:
                    group, peer = self._way(transfer)
                    start = group.recv if receive else group.send
                    tensors = transfer.tensors if receive else _contiguous(transfer.tensors)
                    posted[position] = _Posted([start([tensor], peer, 0) for tensor in tensors], tensors)
        return [handle for handle in posted if handle is not None]

    def _post_coalesced(self, batch: Sequence[Transfer]) -> list[_Posted]:
        """For NCCL: one call per batch and communicator. Otherwise crossing messages of two ranks would deadlock."""
        kept = [t.tensors if t.receive else _contiguous(t.tensors) for t in batch]
        works: dict[int, list[Any]] = {}
        for number in dict.fromkeys(t.communicator for t in batch):
            operations = []
            for t, tensors in zip(batch, kept, strict=True):
                if t.communicator == number:
                    start, (group, peer) = dist.irecv if t.receive else dist.isend, self._way(t)
                    operations += [dist.P2POp(start, tensor, group=group, group_peer=peer) for tensor in tensors]
            works[number] = dist.batch_isend_irecv(operations) if operations else []
        return [_Posted(works[t.communicator], tensors) for t, tensors in zip(batch, kept, strict=True)]


def wait_for(work: dist.Work, timeout: timedelta, *, on_stream: bool) -> None:
    """Wait for pending work of torch.distributed.

    timeout: longest wait. on_stream: the device's stream waits without a timeout, and the host launches what comes
        next. With a timeout NCCL would block the host until the device is here, and no later work could overlap.
    """
    if on_stream:
        work.wait()
    else:
        work.wait(timeout)


def plain_text(error: RuntimeError) -> str:
    """gloo's error text without the line of gloo's source and without its advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).split(" This is typically")[0]


def _contiguous(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple([tensor.contiguous() for tensor in tensors])
