"""What the runtime asks of a device, as protocols: streams, events, memory of the host, capabilities.

A *stream* runs works in order, beside other streams and the host. An *event* marks a place in a stream, for others to
wait for. On a device without streams every work is done when its call returns, and all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

CAPABILITIES = {
    "streams": "works that run beside compute",
    "pinned memory": "host memory that the device reads and writes beside compute",
    "graphs": "a call's launches as one graph",
    "triton": "kernels that Triton compiles",
    "grouped products": "products of groups of rows whose ends the host does not know",
    "fp8 products": "grouped products of rows in fp8",
    "masked groups": "attention of groups of heads with a mask, as one kernel",
    "own generator": "random numbers from a generator of its own",
    "native dropout": "dropout whose kernel draws and multiplies",
    "wide sums": "products added to a sum of a wider type, in one kernel",
}
"""What `ComputeDevice.supports` may be asked for."""


class DeviceEvent(Protocol):
    """A place in a stream."""

    def wait(self, stream: Any) -> None:
        """Let later works of a stream begin behind this place. The host goes on."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for this place."""
        ...

    def query(self) -> bool:
        """Whether the device has come to this place."""
        ...


class DeviceStream(Protocol):
    """A queue of works."""

    def synchronize(self) -> None:
        """Let the host wait for all works so far."""
        ...


class CapturedCall(NamedTuple):
    """A call whose works `replay` runs again, at the same addresses and without Python of the call.

    results: what the call gave. ran: whether its works have run while it was captured; otherwise the first replay does.
    """

    replay: Callable[[], None]
    results: Any
    ran: bool


class ComputeDevice(Protocol):
    """A device on which a rank computes.

    least_copy: bytes of a tensor below which a copy to the host costs more than the memory that it frees.
    """

    where: torch.device
    least_copy: int

    def stream(self, name: str, high: bool = False) -> DeviceStream:
        """A new stream. name: its lane, for messages. high: with priority over compute."""
        ...

    def current(self) -> DeviceStream:
        """The stream that works are started on here."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Start the works of a ``with`` block on a stream."""
        ...

    def record(self, stream: Any = None) -> DeviceEvent:
        """An event behind all works so far of a stream; of the current one by default."""
        ...

    def reached(self, event: Any, seconds: float) -> bool:
        """Let the host wait for an event, at most so long. Whether the device has come there."""
        ...

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that a stream uses a tensor [...] which another stream has allocated.

        Its memory is then not used again before the works of ``stream`` so far are done.
        """
        ...

    def host_memory(self, count: int) -> Tensor:
        """[count] uint8 on the host, for copies beside compute. Where it is not pinned a warning says so, once."""
        ...

    def lend(self, memory: Tensor) -> None:
        """Let copies beside compute use memory [bytes] of the host that something else has allocated.

        Where that cannot be had, a warning says so once, and the host waits for such copies.
        """
        ...

    def take_back(self, memory: Tensor) -> None:
        """End what `lend` began, before the memory is freed. No copy uses the memory then."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether works on a tensor [...] run in streams: it lies on the device."""
        ...

    def supports(self, what: str) -> str:
        """Why the device does not have one of `CAPABILITIES`; empty where it does."""
        ...

    def graph_pool(self) -> Any:
        """Memory that graphs share."""
        ...

    def captured(self, call: Callable[[], Any], pool: Any, stream: Any = None, *, whole: bool = False) -> CapturedCall:
        """A call as one graph; as a tape of its operations where the device has no graphs.

        pool: as of `graph_pool`. stream: where the call runs; by default a stream of torch's for graphs. Side streams
        are forked from it, and joined to it when the call ends. whole: the call is a step, and writes tensors from
        outside.
        """
        ...

    def is_captured(self) -> bool:
        """Whether works that are started here become a part of a graph."""
        ...
