"""How a spare process reads the ends of the ranks that it has forked: late enough for others to see them in /proc."""

from __future__ import annotations

import os
import time

read_at_once = os.waitpid
_SEEN = 0.1
"""Seconds in which the keeper and other ranks read from /proc how a rank has ended. The parent's read takes it away."""
_last = 0.0


def read_late(pid: int, options: int) -> tuple[int, int]:
    """As ``os.waitpid``, a moment later. Ends that come together wait once."""
    global _last
    if time.monotonic() - _last > _SEEN:
        time.sleep(_SEEN)
        _last = time.monotonic()
    return read_at_once(pid, options)
