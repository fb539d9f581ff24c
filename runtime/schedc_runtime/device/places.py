"""Says where the program is: file and line, and the instruction that a rank runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Protocol

_RUNTIME = Path(__file__).resolve().parents[1]


class RunningRank(Protocol):
    """Knows the running instruction of a rank."""

    def at_work(self) -> Callable[[], str]:
        """Returns a function with the text of the running instruction."""
        ...


_RUNNING: list[RunningRank] = []
"""Empty, or the running rank."""


def begin_running(rank: RunningRank) -> None:
    """A rank begins to run instructions."""
    _RUNNING[:] = [rank]


def pause_running() -> None:
    """The rank does something else."""
    _RUNNING.clear()


def during() -> Callable[[], str]:
    """Says which instruction runs now, or nothing. The text is made when it is asked for."""
    return _RUNNING[-1].at_work() if _RUNNING else str


def code_lines() -> Iterator[tuple[str, int, bool]]:
    """(file, line, whether it is of the runtime, with a path) of the code that runs, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        file, own = _file(frame.f_code)
        if file:
            yield file, frame.f_lineno, own
        frame = frame.f_back  # type: ignore[assignment]


def place() -> str:
    """File and line of the runtime that runs now; of the file that calls torch where no line of it does."""
    file, line, _ = next((each for each in code_lines() if each[2]), None) or next(code_lines(), ("?", 0, False))
    return f"{file}:{line}"


@cache
def _file(code: CodeType) -> tuple[str, bool]:
    """The file of a function, and whether it is of the runtime; empty for torch, devices and the capture checker."""
    path = Path(code.co_filename)
    if path.is_relative_to(_RUNTIME):
        parts = path.relative_to(_RUNTIME).parts
        return "" if parts[0] in ("device", "capture") else "/".join(parts), True
    return "" if "torch" in path.parts or code.co_filename.startswith("<") else path.name, False
