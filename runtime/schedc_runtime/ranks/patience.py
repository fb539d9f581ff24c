"""Limits how long a rank waits for others inside a step, by the steps before: a hang is then found in half a minute."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

TIMES = 20.0
"""The longest wait, as a multiple of the longest step."""
LEAST = 30.0
"""The least limit in seconds, unless ``timeout`` is less."""
_STEPS = 3
"""Number of steps of a stream without a learnt limit. The first steps compile, connect and allocate."""


class Patience:
    """The limit of waits in the step that runs.

    most: the longest limit, in seconds. apply: sets the limit of this rank's waits, in seconds.
    """

    def __init__(self, most: float, apply: Callable[[float], object]) -> None:
        self.most, self.limit, self.longest = most, most, 0.0
        self._apply = apply
        self._seen: weakref.WeakKeyDictionary[object, tuple[int, float]] = weakref.WeakKeyDictionary()
        self._stream: object = None
        self._began = 0.0

    def begin(self, stream: object) -> None:
        """A step begins to run ``stream``, which is the same object for each step with messages of the same shapes."""
        steps, self.longest = self._seen.get(stream, (0, 0.0))
        self._stream, self._began = stream, time.monotonic()
        self._set(min(self.most, max(LEAST, TIMES * self.longest)) if steps >= _STEPS else self.most)

    def end(self, *, whole: bool) -> None:
        """The step is over, and ``whole`` if it has not failed. Waits between steps have the longest limit."""
        if self._stream is None:
            return
        if whole:
            steps, longest = self._seen.get(self._stream, (0, 0.0))
            self._seen[self._stream] = steps + 1, max(longest, time.monotonic() - self._began)
        self._stream = None
        self._set(self.most)

    def told(self) -> str:
        """Why a wait gave up when it did; "" where that is ``timeout`` itself."""
        if self.limit == self.most:
            return ""
        learnt = f"{TIMES:g} times the longest step so far, {self.longest:.2f} s, and at least {LEAST:g} s"
        return f"a wait in this step may take {self.limit:g} s: {learnt}; `timeout` is {self.most:g} s"

    def _set(self, limit: float) -> None:
        if limit != self.limit:
            self.limit = limit
            self._apply(limit)
