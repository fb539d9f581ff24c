"""Where an operation comes from: file and line of the innermost code that is not torch's, and the instruction."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from schedc_runtime.device.places import during

_RUNTIME = Path(__file__).resolve().parents[1]


class LaunchPlace(NamedTuple):
    """Files of the runtime are paths inside of it, others are names. during: says which instruction runs, if any."""

    file: str
    line: int
    during: Callable[[], str]

    def __str__(self) -> str:
        running = self.during()
        return f"{self.file}:{self.line}" + (f", in {running}" if running else "")


def launch_place() -> LaunchPlace:
    """The place of the code that calls torch now. A model's own line counts before those of the runtime."""
    frame = sys._getframe(1)
    while frame is not None:
        if file := _file(frame.f_code):
            return LaunchPlace(file, frame.f_lineno, during())
        frame = frame.f_back  # type: ignore[assignment]
    return LaunchPlace("?", 0, during())


@cache
def _file(code: CodeType) -> str:
    """The file of a function; empty for torch, the device and this room."""
    path = Path(code.co_filename)
    if path.is_relative_to(_RUNTIME):
        parts = path.relative_to(_RUNTIME).parts
        return "" if parts[0] in ("device", "capture") else "/".join(parts)
    return "" if "torch" in path.parts or code.co_filename.startswith("<") else path.name
