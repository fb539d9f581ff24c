"""Lanes: what a rank runs beside its compute, one work after the other on each lane.

    device          a lane is        run                                     join
    CPU             nothing          runs the work at once                   nothing is left
    CPU, threads    a thread         queues the work                         waits for the thread
    CUDA            a stream         the stream waits for compute so far     compute waits for the work's event

On CUDA the host waits for nothing. A work's tensors must be held until its join: nothing tells the allocator of the
second stream. Memory that a work frees is used again by compute alone, which then is behind the join. Memory that a
work fills is allocated by compute before the run, so that the work is behind whoever used it before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

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

    def close(self) -> None:
        """Free threads and host buffers."""
        ...


def lanes_for(device: torch.device, *, threads: bool = False) -> Lanes:
    """The lanes of a rank that computes on ``device``. threads: on a CPU, a thread per lane."""
    if device.type == "cuda":
        return StreamLanes(device)
    return ThreadLanes() if threads else AtOnce()


class AtOnce:
    """Lanes of a CPU on which a work runs when it is started."""

    def __init__(self) -> None:
        self.buffers = HostBuffers(pinned=False)

    def run(self, lane: str, work: Work) -> None:
        work()

    def join(self, handle: None) -> None:
        return

    def close(self) -> None:
        self.buffers.close()


class ThreadLanes:
    """Lanes of a CPU with a thread each, made at its first use."""

    def __init__(self) -> None:
        self.buffers = HostBuffers(pinned=False)
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def run(self, lane: str, work: Work) -> Future[None]:
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"lane {lane}")
        waiting = [work]
        del work
        return self._threads[lane].submit(lambda: waiting.pop()())  # the thread keeps no tensor of the work

    def join(self, handle: Future[None]) -> None:
        handle.result()

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()
        self.buffers.close()


class StreamLanes:
    """Lanes of a GPU with a stream each, made at its first use."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.buffers = device, HostBuffers(pinned=True)
        self._streams: dict[str, torch.cuda.Stream] = {}

    def run(self, lane: str, work: Work) -> torch.cuda.Event:
        stream = self._streams.get(lane)
        if stream is None:
            stream = self._streams[lane] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
        done: torch.cuda.Event = stream.record_event()
        return done

    def join(self, handle: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(handle)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        self._streams.clear()
        self.buffers.close()
