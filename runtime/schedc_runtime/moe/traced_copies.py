"""When copies of experts that last for a step travel in a traced step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class CopySpan(NamedTuple):
    """An exchange of copies on a lane of links, from its start to its join on the host, in ns of `perf_counter_ns`.

    layer: number in the stage. microbatch: -1 where copies last for the step.
    """

    lane: str
    gradients: bool
    stage: int
    layer: int
    microbatch: int
    start: int
    end: int


joined: list[Callable[[CopySpan], None]] = []
"""Functions to call with each exchange of copies that has been joined."""


class TracedCopies:
    """A context in which exchanges of copies are kept."""

    def __enter__(self) -> TracedCopies:
        self._spans: list[CopySpan] = []
        joined.append(self._spans.append)
        self._keep = joined[-1]
        return self

    def __exit__(self, *_: object) -> None:
        joined.remove(self._keep)

    def take(self) -> list[CopySpan]:
        """The exchanges that were joined since the last call."""
        spans = list(self._spans)
        self._spans.clear()
        return spans
