"""Tells code and objects of a model's authors from those of libraries, and gives the line of their code for errors."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import sympy
import torch

from schedc_runtime.partition.frozen import MISSING

_OWN, _SYMPY = Path(__file__).parents[1], Path(sympy.__file__).parent
HIDDEN = (
    *(str(_OWN / room) for room in ("materialize", "partition", "random_numbers", "row_flow")),
    *map(str, (Path(torch.__file__).parent, _SYMPY, _SYMPY.with_name("mpmath"))),
)
"""Folders of code that is no model's. Torch computes with symbols by sympy."""
_LIBRARY = sysconfig.get_path("stdlib")
_MODELS = str(_OWN / "models")
_HEAP_TYPE = 1 << 9
"""The flag of a class that Python code has made."""
_KNOWN = sys.stdlib_module_names | {"torch", "numpy", "sympy", "mpmath"}
"""Packages whose objects are compared by identity."""
_NAMESPACES = ("argparse", "__main__")
"""Modules of Python with objects that keep what a user sets."""


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


def _in_a_model(path: str, hidden: str = "<") -> bool:
    """Whether a path is of a model's code. hidden: the beginning of paths of code without a file that is no model's."""
    return not path.startswith((*HIDDEN, hidden)) and ("site-packages" in path or not path.startswith(_LIBRARY))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes that an object itself has; None for one without a dict."""
    try:
        own: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own


def unbound_attribute(kind: type, name: str) -> Any:
    """What a class has under a name, unbound; `MISSING` for nothing."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)


def home_of_value(kind: type, name: str) -> type:
    """The class in which a class has a name."""
    return next((base for base in kind.__mro__ if name in vars(base)), object)


def is_known(value: Any) -> bool:
    """Whether a function, a class or a module is of torch or Python, and does not change."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(module).partition(".")[0] in _KNOWN and module not in _NAMESPACES


def keeps_attributes(kind: type) -> bool:
    """Whether objects of a class are the model's own, with attributes that may change."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not is_known(kind)


def is_users(code: CodeType) -> bool:
    """Whether code may be a model's."""
    path = code.co_filename
    return path.startswith(_MODELS) if path.startswith(str(_OWN)) else _in_a_model(path, "<frozen")
