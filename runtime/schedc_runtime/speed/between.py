"""The time between two steps, in which a rank waits for its data: how much longer than usual, in shares of a step.

A wait takes no processor time, so these are times of the wall. What a rank waits for others between its steps is taken
off, and so is the time in which it was ready without a core. Less than `LEAST` more than usual counts as nothing.
"""

from __future__ import annotations

from math import log
from statistics import median
from time import perf_counter_ns

from schedc_runtime.execute.interruptions import time_off_core
from schedc_runtime.ranks.control import ControlPlane

LEAST = 5e6
"""Nanoseconds above the usual time from which on a rank may be late."""

Pause = tuple[int, int]
"""Nanoseconds between two steps, and from the end of the first one to the end of the second."""


class PauseClock:
    """Measures the time between the steps of a process."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._end = self._begin = (0, 0)

    def begin(self) -> None:
        """A step begins."""
        self._begin = self._now()

    def last(self) -> Pause:
        """The time in front of the step that has run, when it has ended."""
        between = sum(self._begin) - sum(self._end)
        return max(0, between), perf_counter_ns() - self._end[0]

    def end(self) -> None:
        """A step has ended, with all that belongs to it."""
        self._end = self._now()

    def _now(self) -> tuple[int, int]:
        return perf_counter_ns(), -self._control.waited - time_off_core()


class UsualPauses:
    """The times in front of the steps of one stream, compared with the usual one."""

    def __init__(self) -> None:
        self._steps: list[Pause] = []
        self._usual, self._period = 0.0, 1.0

    def add(self, pause: Pause) -> None:
        """Take in a step."""
        self._steps.append(pause)

    def forget(self, steps: slice) -> None:
        """Leave steps out."""
        del self._steps[steps]

    def settle(self) -> None:
        """Make the steps so far the usual ones."""
        self._usual, self._period = (float(median(times)) for times in zip(*self._steps, strict=True))
        self._steps = []

    def take(self) -> list[float]:
        """[steps since the last call] logarithm of what a step has become, if nothing else had changed."""
        longer = [between - self._usual for between, _ in self._steps]
        self._steps = []
        return [log(1 + more / self._period) if more >= LEAST else 0.0 for more in longer]
