"""Lets the host wait for a device no longer than a limit, and look meanwhile for what has stopped other ranks.

A device whose message never comes waits for ever, and so would a host that waits for the device. Waits of a step
therefore go through `await_event`, under the limit of whoever runs the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from schedc_runtime.device.base import ComputeDevice, DeviceEvent
from schedc_runtime.errors import RuntimeFault

LOOK = 0.5
"""Seconds between two looks at other ranks while the host waits."""


class DeviceLate(Exception):
    """The device did not come to an event within the limit."""


class HostLimit(NamedTuple):
    """How long the host waits for its device.

    seconds: without any progress. look: whether the device has come on since the last look; it raises what another rank
    has reported.
    """

    seconds: float
    look: Callable[[], bool]


_LIMITS: list[HostLimit] = []
"""The last one holds."""


@contextmanager
def limited(limit: HostLimit | None) -> Iterator[None]:
    """Let waits of the host inside keep to a limit; None: to none."""
    begin_limit(limit)
    try:
        yield
    finally:
        end_limit(limit)


def begin_limit(limit: HostLimit | None) -> None:
    """As `limited`, until `end_limit`."""
    if limit is not None:
        _LIMITS.append(limit)


def end_limit(limit: HostLimit | None) -> None:
    """Go back to the limit before, behind the end of what `begin_limit` has begun."""
    if limit is not None:
        _LIMITS.pop()


def await_event(device: ComputeDevice, event: DeviceEvent) -> None:
    """Let the host wait for an event of ``device``. Raises `DeviceLate` behind the limit that holds here."""
    if not _LIMITS:
        event.synchronize()
        return
    limit = _LIMITS[-1]
    since = time.monotonic()
    while not device.reached(event, min(LOOK, limit.seconds)):
        if limit.look():
            since = time.monotonic()
        elif time.monotonic() - since >= limit.seconds:
            raise DeviceLate(f"the device has ended nothing for {limit.seconds:g} s")


def check_seconds(name: str, seconds: object) -> None:
    """Raise `RuntimeFault` unless a limit is a number of seconds that can pass."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 < float(seconds) < math.inf:  # type: ignore[arg-type]
        raise RuntimeFault(
            f"{name}={seconds!r} is no time that a rank can wait",
            "give seconds above 0, longer than the longest instruction of a step takes",
        )
