"""CUDA's rules about streams while a graph is captured, for the simulated device.

A stream enters a capture when it waits for an event of it. Works of other streams are not in the graph. A wait for an
event from before the capture ends it with an error. So does a wait of the host, and a stream that is not joined.
"""

from __future__ import annotations

from schedc_runtime.device.order import StreamOrder, WatchedLane


class CaptureBroken(AssertionError):
    """A capture that CUDA would refuse, or whose graph would lack works."""


class CaptureRules:
    """One capture. lane: where it begins and ends."""

    def __init__(self, order: StreamOrder, lane: WatchedLane) -> None:
        self._order, self._lane = order, lane
        self._begun = lane.step()
        self._before = {each.number: each.clock.get(each.number, 0) for each in order.lanes}

    def check_wait(self, lane: WatchedLane, inside: bool) -> None:
        """A stream waits for an event. inside: the event was recorded in this capture."""
        if not inside:
            raise CaptureBroken(f"{lane.name} waits for an event from before the capture")

    def check_host(self) -> None:
        """The host waits for the device, which no capture allows."""
        raise CaptureBroken("the host waits for an event while a graph is captured")

    def end(self) -> None:
        """Raise `CaptureBroken` for streams that ran works without being forked from the capture, or joined to it."""
        for lane in self._order.lanes:
            now = lane.clock.get(lane.number, 0)
            if lane in (self._lane, self._order.host) or now == self._before.get(lane.number, 0):
                continue
            if lane.clock.get(self._lane.number, 0) < self._begun:
                raise CaptureBroken(f"{lane.name} runs works outside of the capture, which it has never waited for")
            if self._lane.clock.get(lane.number, 0) < now:
                raise CaptureBroken(f"{lane.name} is not joined when the capture ends")
