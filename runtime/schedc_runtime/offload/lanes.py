"""Lanes: what a rank runs beside its compute, one work after the other on each lane.

    device          a lane is        run                                     join
    CPU             nothing          runs the work at once                   nothing is left
    CPU, threads    a thread         queues the work                         waits for the thread
    GPU             a stream         the stream waits for compute so far     compute waits for the work's event

On a GPU the host waits for nothing. A work's tensors must be held until its join: nothing tells the allocator of the
second stream. Memory that a work frees is used again by compute alone, which then is behind the join. Memory that a
work fills is allocated by compute before the run, so that the work is behind whoever used it before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from schedc_runtime.device.base import ComputeDevice, DeviceEvent, DeviceStream
from schedc_runtime.device.choice import device_for
from schedc_runtime.device.limits import await_event
from schedc_runtime.offload.host_buffers import HostBuffers

TO_HOST, FROM_HOST = "d2h", "h2d"
"""The lanes of copies, one for each direction."""

Work = Callable[[], None]


class Lanes(Protocol):
    """The lanes of one rank, and its host buffers."""

    buffers: HostBuffers

    def run(self, lane: str, work: Work) -> Any:
        """Start a work on a lane, behind compute so far and behind the lane's earlier works; returns a handle."""
        ...

    def join(self, handle: Any) -> None:
        """Let compute go on behind that work. Raises what the work raised."""
        ...

    def wait(self, handle: Any) -> None:
        """Let the host wait for a work that was joined."""
        ...

    def done(self, handle: Any) -> bool:
        """Whether a work that was joined is known to be done."""
        ...

    def close(self) -> None:
        """Free threads and host buffers."""
        ...


def lanes_for(device: torch.device, *, threads: bool = False) -> Lanes:
    """The lanes of a rank that computes on ``device``. threads: on a CPU, a thread per lane."""
    seam = device_for(device)
    return ThreadLanes() if threads and seam.supports("streams") else StreamLanes(seam)


class ThreadLanes:
    """Lanes of a CPU with a thread each, made at its first use."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def run(self, lane: str, work: Work) -> Future[None]:
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"lane {lane}")
        waiting = [work]
        del work
        return self._threads[lane].submit(lambda: waiting.pop()())  # the thread keeps no tensor of the work

    def join(self, handle: Future[None]) -> None:
        handle.result()

    def wait(self, handle: Future[None]) -> None:
        handle.result()

    def done(self, handle: Future[None]) -> bool:
        return handle.done()

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()
        self.buffers.close()


class StreamLanes:
    """Lanes with a stream each, made at its first use. On a device without streams a work runs when it is started.

    device: that of the CPU by default.
    """

    def __init__(self, device: ComputeDevice | None = None) -> None:
        self.device = device or device_for(torch.device("cpu"))
        self.buffers = HostBuffers(self.device)
        self._streams: dict[str, DeviceStream] = {}

    def run(self, lane: str, work: Work) -> DeviceEvent:
        stream = self._streams.get(lane)
        if stream is None:
            stream = self._streams[lane] = self.device.stream(lane)
        self.device.record().wait(stream)
        with self.device.on(stream):
            work()
        return self.device.record(stream)

    def join(self, handle: DeviceEvent) -> None:
        handle.wait(self.device.current())

    def wait(self, handle: DeviceEvent) -> None:
        await_event(self.device, handle)

    def done(self, handle: DeviceEvent) -> bool:
        return handle.query()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        self._streams.clear()
        self.buffers.close()
