"""Counts the interpreter's instructions of a call, by function: a measure of Python that other load does not change."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple


class FunctionCount(NamedTuple):
    """What a function ran in a call. file: where its code is, with the folder. name: with the class."""

    file: str
    name: str
    calls: int
    instructions: int


def total(rows: Iterable[FunctionCount]) -> int:
    """The instructions of some functions."""
    return sum(row.instructions for row in rows)


def counted(function: Callable[[], Any]) -> list[FunctionCount]:
    """The instructions of one call of ``function`` in this thread, of the functions with the most of them first."""
    calls, instructions = Counter[CodeType](), Counter[CodeType]()

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            instructions[frame.f_code] += 1
        return inside

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        calls[frame.f_code] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        function()
    finally:
        sys.settrace(before)
    return [
        FunctionCount("/".join(Path(code.co_filename).parts[-2:]), code.co_qualname, calls[code], count)
        for code, count in instructions.most_common()
    ]
