"""Progress of a search on stderr: which stage, and how many plans; one line that is written over, in terminals only."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

_APART = 0.1
"""Seconds between two writes."""


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

    def __call__(self, stage: str, count: int) -> None:
        """Says how many plans a stage has done."""
        if self._shows and time.monotonic() - self._last >= _APART:
            self._last = time.monotonic()
            self._write(f"{stage}: {count:,} plans")

    def _write(self, text: str) -> None:
        if self._width or text:
            self._stream.write(f"\r{text:<{self._width}}" + ("" if text else "\r"))
            self._stream.flush()
            self._width = len(text)
