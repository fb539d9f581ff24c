"""Copies beside compute: a stream of a GPU of their own, or nothing at all on a CPU, where work is done when called.

Collectives between processes bring a stream of their own (NCCL's). This is for ranks that share one process and one
GPU, whose collectives are copies: on the computing stream they would wait for everything before them, and everything
behind them for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Ahead(NamedTuple):
    """Work that a `SideStream` has taken. result: tensors, which may be read after `joined`; done: when they are."""

    result: Any
    done: torch.cuda.Event | None


class SideStream:
    """Where copies run: for every GPU one stream, made when it is first needed."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, work: Callable[[], Any], taken: Iterable[Tensor]) -> Ahead:
        """Run ``work``, which reads the tensors ``taken`` as they are now on the current stream; returns at once."""
        taken = list(taken)
        device = next((tensor.device for tensor in taken if tensor.is_cuda), None)
        if device is None:
            return Ahead(work(), None)
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            result = work()
        for tensor in taken:
            tensor.record_stream(side)  # its memory may not be used again before the copies have read it
        return Ahead(result, side.record_event())


def joined(ahead: Ahead, tensors: Iterable[Tensor]) -> None:
    """Let the current stream wait for work on a side stream, whose results ``tensors`` it is going to use."""
    if ahead.done is None:
        return
    for tensor in tensors:
        here = torch.cuda.current_stream(tensor.device)
        here.wait_event(ahead.done)
        tensor.record_stream(here)  # made on the side stream, freed by users of this one
