"""The line of the model's own code in which something happens, for errors."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path
from types import CodeType
from typing import Any

import sympy
import torch

_OWN, _SYMPY = Path(__file__).parents[1], Path(sympy.__file__).parent
HIDDEN = (
    *(str(_OWN / room) for room in ("partition", "random_numbers", "row_flow")),
    *map(str, (Path(torch.__file__).parent, _SYMPY, _SYMPY.with_name("mpmath"))),
)
"""Folders of code that is no model's. Torch computes with symbols by sympy."""
_LIBRARY = sysconfig.get_path("stdlib")


def user_line(error: BaseException | None = None) -> str:
    """``FILE:LINE: TEXT``, on a line of its own: of an error's innermost frame in a model, or of the caller's.

    "" if there is no such frame. Frames of Python, of torch and of this package do not count.
    """
    places: list[tuple[CodeType, int]] = []
    if error is not None:
        trace = error.__traceback__
        while trace is not None:
            places.append((trace.tb_frame.f_code, trace.tb_lineno))
            trace = trace.tb_next
    else:
        frame: Any = sys._getframe(1)
        while frame is not None:
            places.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        places.reverse()
    for code, line in reversed(places):
        if _in_a_model(code.co_filename):
            return f"\n  --> {code.co_filename}:{line}: {linecache.getline(code.co_filename, line).strip()}"
    return ""


def _in_a_model(path: str) -> bool:
    return not path.startswith((*HIDDEN, "<")) and ("site-packages" in path or not path.startswith(_LIBRARY))
