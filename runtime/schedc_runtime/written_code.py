"""Makes functions of Python text that was written at run time, whose lines tracebacks show."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from types import FunctionType
from typing import Any


def function_of(name: str, text: str, file: str, constants: Mapping[str, Any], *, shown: bool = True) -> FunctionType:
    """The function ``name`` that ``text`` defines.

    file: what tracebacks call the text. constants: by name, what the text uses; they are the function's globals.
    shown: keep the text, so that tracebacks show its lines.
    """
    if shown:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = dict(constants)
    exec(compile(text, file, "exec"), names)
    function: FunctionType = names[name]
    return function
