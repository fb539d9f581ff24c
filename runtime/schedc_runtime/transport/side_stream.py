"""A second GPU stream for copies that overlap with compute; on a CPU the work runs at once.

Collectives between processes have NCCL's own stream. This one serves ranks that share one process and one GPU, whose
collectives are copies. On the compute stream the copies would wait for all work before them, and all later work would
wait for the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedc_runtime.transport.priorities import HIGH, NORMAL


class Ahead(NamedTuple):
    """Work on a `SideStream`.

    result: its tensors, which may be read after `joined`. done: event at the end of the work; None on a CPU.
    """

    result: Any
    done: torch.cuda.Event | None


class SideStream:
    """Runs copies on one side stream per GPU, made at its first use. high: a stream of high priority."""

    def __init__(self, high: bool = False) -> None:
        self._priority = HIGH if high else NORMAL
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, work: Callable[[], Any], taken: Iterable[Tensor]) -> Ahead:
        """Start ``work``, which reads the tensors ``taken``, of any shape, in their present state; returns at once."""
        taken = list(taken)
        device = next((tensor.device for tensor in taken if tensor.is_cuda), None)
        if device is None:
            return Ahead(work(), None)
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device, priority=self._priority)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            result = work()
        for tensor in taken:
            tensor.record_stream(side)  # its memory must not be reused before the copies have read it
        return Ahead(result, side.record_event())


def joined(ahead: Ahead, tensors: Iterable[Tensor]) -> None:
    """Let the current stream wait for work on a side stream. tensors: its results [...], which are used next."""
    if ahead.done is None:
        return
    for tensor in tensors:
        here = torch.cuda.current_stream(tensor.device)
        here.wait_event(ahead.done)
        tensor.record_stream(here)  # made on the side stream, freed by users of this one
