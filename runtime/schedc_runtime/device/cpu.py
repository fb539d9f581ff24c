"""A device without streams: everything is done when its call returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.device.base import CAPABILITIES, CapturedCall, ComputeDevice, DeviceEvent, DeviceStream
from schedc_runtime.device.tape import LaunchTape

_LACKS = {
    "streams": "{} has no streams",
    "pinned memory": "{} copies nothing beside compute",
    "graphs": "{} has no graphs",
    "triton": "{}: these kernels need a GPU of compute capability 8.0",
    "own generator": "{} draws from the generator of the host",
    "native dropout": "{} draws the numbers of dropout by `bernoulli_`",
    "wide sums": "{} multiplies in the type of the sum",
    "fp8 products": "fp8 products take bfloat16 rows on a GPU of compute capability 9 or 10",
}
"""Reasons by capability. {}: the type of the device."""


class NoStream:
    """The stream, and an event, of a device that has none."""

    def wait(self, stream: Any) -> None:
        return

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


_NONE = NoStream()


class CpuDevice(ComputeDevice):
    """A CPU, or another device that torch runs without streams."""

    least_copy = 0

    def __init__(self, where: torch.device | None = None) -> None:
        self.where = where or torch.device("cpu")
        self._lacks = {what: _LACKS.get(what, "").format(self.where.type) for what in CAPABILITIES}

    def stream(self, name: str, high: bool = False) -> DeviceStream:
        return _NONE

    def current(self) -> DeviceStream:
        return _NONE

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, stream: Any = None) -> DeviceEvent:
        return _NONE

    def reached(self, event: Any, seconds: float) -> bool:
        return True

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        return

    def host_memory(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def lend(self, memory: Tensor) -> None:
        return

    def take_back(self, memory: Tensor) -> None:
        return

    def holds(self, tensor: Tensor) -> bool:
        return False

    def supports(self, what: str) -> str:
        return self._lacks[what]

    def graph_pool(self) -> None:
        return None

    def captured(self, call: Callable[[], Any], pool: Any, stream: Any = None, *, whole: bool = False) -> CapturedCall:
        tape = LaunchTape(outside=whole, counted=whole)
        with self.on(stream), tape:
            results = call()
        return CapturedCall(tape.replay, results, True)

    def is_captured(self) -> bool:
        return False
