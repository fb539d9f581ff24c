"""Lets the code of a model see symbolic sizes as plain numbers: what it asks is answered as for an int, or recorded.

    isinstance(t, int)   True, as of a plain size
    t > 64               True or False, and a condition of the recording: code may ask `is True`
    f"{t}"               the digits, and the condition that the size is this one

torch's own code knows symbols, and sees them as they are.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from schedc_runtime.partition.code_names import GLOBAL
from schedc_runtime.partition.structure import attributes, closure_values
from schedc_runtime.partition.symbols import NotSymbolic, SizeTerm, Symbols, exact, settled

_PLAIN: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_ATOMS = (type, ModuleType, nn.Module, Tensor, torch.dtype, torch.device, str, bytes, int, float, complex)
_DEPTH = 5
"""How deep a value is searched for symbols."""
Method = Callable[..., Any]


@contextmanager
def seen_as_plain() -> Iterator[None]:
    """Changes the classes of symbolic numbers, and changes them back."""
    changed: list[tuple[type, str, Method]] = []
    for kind, plain in _PLAIN.items():
        changed += [
            (kind, "__getattribute__", _attribute(plain)),
            (kind, "__repr__", _shown(plain, kind.__repr__)),
            (kind, "__format__", _shown(plain, lambda value, _, shown=kind.__repr__: shown(value))),
        ]
        if kind is not torch.SymBool:
            changed += [(kind, name, _compared(getattr(kind, name))) for name in _COMPARED]
    with ExitStack() as stack:
        for kind, name, method in changed:
            stack.enter_context(mock.patch.object(kind, name, method))
        yield


def _by_model(frame: Any) -> bool:
    """Whether a frame is code that need not know symbols."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] not in ("torch", "sympy")


def _attribute(plain: type) -> Method:
    def attribute(value: Any, name: str) -> Any:
        if name == "__class__" and _by_model(sys._getframe(1)):
            return plain
        return object.__getattribute__(value, name)

    return attribute


def _shown(plain: type, original: Method) -> Method:
    def shown(value: Any, *form: str) -> str:
        return format(plain(value), *form) if _by_model(sys._getframe(1)) else original(value, *form)

    return shown


def _compared(original: Method) -> Method:
    def compare(value: Any, other: Any) -> Any:
        result = original(value, other)
        return bool(result) if isinstance(result, torch.SymBool) and _by_model(sys._getframe(1)) else result

    return compare


def sized(value: Any, where: str) -> Any:
    """What stands in a recording for an argument without tensors: a `SizeTerm`, or a plain value, with a condition.

    where: what is called. Raises `NotSymbolic` for what keeps symbols.
    """
    if type(value) is torch.SymBool:
        return bool(value)
    if type(value) in _PLAIN:
        expression = value.node.expr
        return _PLAIN[type(value)](value) if expression.is_number or not exact(expression) else SizeTerm(expression)
    if has_symbols(value):
        raise NotSymbolic(f"{where} is a {type(value).__name__} that keeps a size")
    return value


@lru_cache(maxsize=4096)
def asks_for_class(code: CodeType) -> bool:
    """Whether code may compare ``type(size)`` with a class of numbers: nobody can answer for a symbol."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in GLOBAL}
    return "type" in names and not names.isdisjoint(("int", "float", "bool"))


def has_symbols(value: Any, seen: set[int] | None = None, depth: int = 0) -> bool:
    """Whether a value is a symbolic number, or keeps one: in a container, an attribute or a closure."""
    if type(value) in _PLAIN:
        return True
    seen = set() if seen is None else seen
    if value is None or isinstance(value, _ATOMS) or depth > _DEPTH or id(value) in seen:
        return False
    seen.add(id(value))
    return any(has_symbols(inner, seen, depth + 1) for inner in _inner(value))


def _inner(value: Any) -> Iterable[Any]:
    """What a value keeps."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (Sequence, Set)):
        return list(value)
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, np.ndarray):
        return value.flat if value.dtype == object else ()
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, FunctionType):
        return *closure_values(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    return attributes(value)


@contextmanager
def symbols_in_python(model: nn.Module, through: Iterable[str], symbols: Symbols) -> Iterator[None]:
    """Runs a model with symbols in it, and leaves plain numbers in the attributes of its modules.

    Units may keep a size, which `Symbols.left` has. through: the modules that are recorded through, by name. Raises
    `NotSymbolic` if these keep a size: code that reads the size later needs the size of another recording.
    """
    kept: set[str] = set()
    try:
        with seen_as_plain():
            yield
    finally:
        seen: set[int] = set()
        for name, module in model.named_modules():
            own = vars(module)
            for key in [key for key, value in own.items() if has_symbols(value, seen)]:
                kept.add(name)
                if type(own[key]) is torch.SymInt and exact(own[key].node.expr):
                    symbols.left.append((module, key, SizeTerm(own[key].node.expr)))
                own[key] = _plain(own[key], symbols)
    if late := sorted(kept & {*through}):
        raise NotSymbolic(f"`{late[0]}` keeps a size")


def _plain(value: Any, symbols: Symbols) -> Any:
    """The value with plain numbers; lists and dicts stay the same objects."""
    plain = settled(value, symbols.hints)
    if isinstance(value, list):
        value[:] = plain
        return value
    if isinstance(value, dict):
        value.update(plain)
        return value
    return plain
