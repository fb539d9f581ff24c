"""Where an operation comes from: file and line of the innermost code that is not torch's, and the instruction."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

_RUNTIME = Path(__file__).resolve().parents[1]
_ADVANCE = ("Executor.advance", "Executor._advance_observed")
"""The loops of an executor, whose frame says which instruction runs."""


class Place(NamedTuple):
    """file, line: of the runtime as a path inside of it, of other code as a name. executor, position: what runs, if so.

    Text is made when it is asked for: a step has thousands of places.
    """

    file: str
    line: int
    executor: Any = None
    position: int = -1

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        return f"{text}, in {self.executor.at(self.position)}" if self.executor is not None else text


def here() -> Place:
    """The place of the code that calls torch now."""
    frame, file, line = sys._getframe(1), "", 0
    while frame is not None:
        code = frame.f_code
        if not file and (file := _file(code)):
            line = frame.f_lineno
        if code.co_qualname in _ADVANCE:
            found = frame.f_locals
            return Place(file, line, found["self"], found.get("position", found["self"].position))
        frame = frame.f_back  # type: ignore[assignment]
    return Place(file or "?", line)


@cache
def _file(code: CodeType) -> str:
    """The file of a function; empty for torch, the device and this room."""
    path = Path(code.co_filename)
    if path.is_relative_to(_RUNTIME):
        parts = path.relative_to(_RUNTIME).parts
        return "" if parts[0] in ("device", "capture") else "/".join(parts)
    return "" if "torch" in path.parts or code.co_filename.startswith("<") else path.name
