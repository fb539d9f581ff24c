"""Progress of a search on stderr, where it is a terminal: one line of the stage and where the search stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from math import ceil, floor
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from schedc.planner.search.standing import SearchStanding

_APART = 0.1
"""Seconds between two writes."""

_ALIKE = 0.1
"""Times whose ends differ by less, relatively, are written as one."""


class ProgressLine:
    """Writes what a search is at, while the block runs, and clears the line at its end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shows = self._stream.isatty()
        self._width = 0
        self._last = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("")

    def __call__(self, stage: str, count: int, standing: Callable[[], SearchStanding] | None = None) -> None:
        """Says how many plans a stage has done, and where the search stands."""
        if self._shows and time.monotonic() - self._last >= _APART:
            self._last = time.monotonic()
            self._write(f"{stage}: {count:,} plans{'' if standing is None else _standing_text(standing())}")

    def _write(self, text: str) -> None:
        if self._width or text:
            self._stream.write(f"\r{text:<{self._width}}" + ("" if text else "\r"))
            self._stream.flush()
            self._width = len(text)


def _standing_text(standing: SearchStanding) -> str:
    """What is known of a standing. A share is rounded down, so that 100 % is all of it."""
    parts = [
        None if standing.decided is None else f"{floor(1000 * standing.decided) / 10:.1f} % decided",
        None if standing.left is None else _left_text(*standing.left),
        None if standing.best_s is None else f"best step {standing.best_s:#.4g} s",
    ]
    return "".join(f", {part}" for part in parts if part is not None)


def _left_text(least: float, most: float) -> str:
    """The seconds of the rest, as one number if both ends are about equal."""
    low, high = floor(least), ceil(most)
    if high - low <= max(1.0, _ALIKE * high):
        return f"about {high:,} s left"
    return f"{low:,} to {high:,} s left" if low else f"up to {high:,} s left"
