"""Transport over torch.distributed: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from schedc_runtime.transport.base import Transfer, TransportError


class _Posted(NamedTuple):
    works: list[Any]
    kept: tuple[Tensor, ...]
    """The tensors of a send, which must outlive it: gloo sends without a copy."""


class TorchTransport:
    """Sends and receives of one process group, whose group ranks are the pipeline's ranks.

    timeout: seconds that one wait may take. gloo raises after it; NCCL has its own watchdog, set by the timeout that
        the group was made with.
    coalesce: post a batch by one call of the group, as NCCL requires.
    """

    cooperative = False

    def __init__(self, group: dist.ProcessGroup, timeout: float, *, coalesce: bool = False) -> None:
        self.rank = dist.get_rank(group)
        self.group = group
        self._timeout = timedelta(seconds=timeout)
        self._coalesce = coalesce
        self._post_all = self._post_coalesced if coalesce else self._post_each

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
        del self.group, self._post_all

    def _post_each(self, batch: Sequence[Transfer]) -> list[_Posted]:
        """For gloo: receives first, for a peer that posts the same batch the other way round."""
        posted: list[_Posted | None] = [None] * len(batch)
        group = self.group
        for receive in (True, False):
            start = group.recv if receive else group.send
            for position, transfer in enumerate(batch):
                if transfer.receive is receive:
                    tensors = transfer.tensors if receive else _contiguous(transfer.tensors)
                    posted[position] = _Posted([start([tensor], transfer.peer, 0) for tensor in tensors], tensors)
        return [handle for handle in posted if handle is not None]

    def _post_coalesced(self, batch: Sequence[Transfer]) -> list[_Posted]:
        """For NCCL: one group call per batch. Otherwise crossing messages of two ranks would deadlock."""
        kept = [t.tensors if t.receive else _contiguous(t.tensors) for t in batch]
        operations = [
            dist.P2POp(dist.irecv if t.receive else dist.isend, tensor, group=self.group, group_peer=t.peer)
            for t, tensors in zip(batch, kept, strict=True)
            for tensor in tensors
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return [_Posted(works, tensors) for tensors in kept]


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
