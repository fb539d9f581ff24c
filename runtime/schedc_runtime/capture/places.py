"""Where an operation comes from: file and line of the innermost code that is not torch's, and the instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from schedc_runtime.device.places import code_lines, during


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
    file, line, _ = next(code_lines(), ("?", 0, False))
    return LaunchPlace(file, line, during())
