"""Says where the program is: file and line, and the instruction that a rank runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def place() -> str:
    """File and line of the runtime that runs now; of the file that calls torch where no line of it does."""
    frame, other = sys._getframe(1), ""
    while frame is not None:
        where = _named(frame.f_code)
        if where.startswith("/"):
            other = other or f"{where[1:]}:{frame.f_lineno}"
        elif where:
            return f"{where}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return other or "?"


@cache
def _named(code: CodeType) -> str:
    """The file of a function: of the runtime, of another with a slash before it; empty for torch and for this room."""
    path = Path(code.co_filename)
    if path.is_relative_to(_RUNTIME):
        return "" if path.parent == _RUNTIME / "device" else path.relative_to(_RUNTIME).as_posix()
    return "" if "torch" in path.parts or code.co_filename.startswith("<") else f"/{path.name}"
