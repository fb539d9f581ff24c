"""Counts two interruptions of instructions: time in which a thread had no core, and the garbage collector.

Linux says in ``/proc/thread-self/schedstat`` how long a thread was ready and had no core. Elsewhere this is 0.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from time import perf_counter_ns
from typing import NamedTuple

_SCHEDSTAT = "/proc/thread-self/schedstat"


class Interrupted(NamedTuple):
    """Nanoseconds so far. off_core: ready without a core. collecting: in the garbage collector, of all threads."""

    off_core: int
    collecting: int


def time_off_core() -> int:
    """Nanoseconds so far in which this thread was ready without a core; 4 us. For a look now and then."""
    with suppress(OSError):
        file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _off_core(file)
        finally:
            os.close(file)
    return 0


def _off_core(file: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(os.pread(file, 96, 0).split()[1])
    return 0


class Interruptions:
    """A context in which `read` tells the interruptions of the thread that entered it."""

    def __enter__(self) -> Interruptions:
        self._file = -1
        self._collecting = self._began = 0
        with suppress(OSError):
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        gc.callbacks.append(self._collected)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collected)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def read(self) -> Interrupted:
        """What there was so far; 1.3 us."""
        return Interrupted(_off_core(self._file) if self._file >= 0 else 0, self._collecting)

    def _collected(self, phase: str, _about: dict[str, int]) -> None:
        if phase == "start":
            self._began = perf_counter_ns()
        elif self._began:
            self._collecting += perf_counter_ns() - self._began
            self._began = 0
