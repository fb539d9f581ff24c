"""Says what a value of Python is to a recording: code and objects of the model's authors, or of a library."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from schedc_runtime.partition.frozen import MISSING
from schedc_runtime.partition.user_line import HIDDEN

_HEAP_TYPE = 1 << 9
"""The flag of a class that Python code has made."""
_KNOWN = sys.stdlib_module_names | {"torch", "numpy", "sympy", "mpmath"}
"""Packages whose objects are compared by identity."""
_NAMESPACES = ("argparse", "__main__")
"""Modules of Python with objects that keep what a user sets."""
_LIBRARY = sysconfig.get_path("stdlib")
_OWN = str(Path(__file__).parents[1])
_MODELS = str(Path(_OWN, "models"))


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
    if path.startswith(_OWN):
        return path.startswith(_MODELS)
    return not path.startswith((*HIDDEN, "<frozen")) and ("site-packages" in path or not path.startswith(_LIBRARY))
