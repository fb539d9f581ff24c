"""Writes the values that a program's file holds, such as its plan, as shapes of the table: from their classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING
from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from schedc.ir.json_reader import fields_by_name
from schedc.ir.plan import Plan
from schedc.ir.ties import Tie

VALUES = (Plan, Tie)
_ATOMS = {str: "text", bool: "boolean", int: "integer", float: "number"}


def shapes_of_values() -> str:
    """A shape for each class of `VALUES` and of their fields, named as the class."""
    kinds: dict[Any, None] = dict.fromkeys(VALUES)
    waiting = list(VALUES)
    while waiting:
        below = [own for kind, _ in fields_by_name(waiting.pop()).values() for own in _classes(kind)]
        waiting += [own for own in below if own not in kinds]
        kinds |= dict.fromkeys(below)
    return "# Values of a program. A field that a program lacks has its default.\n\n" + "\n".join(map(_shape, kinds))


def _shape(kind: Any) -> str:
    head = f"shape {kind.__name__}  {kind.__doc__.partition('.')[0]}"
    rows = fields_by_name(kind).items()
    lines = [f"  {name}{'' if default is MISSING else '?'} {_type(own)}" for name, (own, default) in rows]
    return "\n".join([head, *lines, ""])


def _type(kind: Any) -> str:
    """A type as the table writes it. None is a default, which is left out."""
    if get_origin(kind) is UnionType:
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        return f"[{_type(get_args(kind)[0])}]"
    if kind in _ATOMS:
        return _ATOMS[kind]
    return " | ".join(f'"{each.value}"' for each in kind) if issubclass(kind, Enum) else kind.__name__


def _classes(kind: Any) -> Iterator[Any]:
    """The classes with fields in a type."""
    if inside := get_args(kind):
        for each in inside:
            yield from _classes(each)
    elif fields_by_name(kind):
        yield kind
