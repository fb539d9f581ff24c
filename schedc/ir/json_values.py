"""Values of frozen dataclasses as JSON takes them, such as a plan, and back with every check of types.

An object leaves out fields that have their default. An enumeration is its word, a tuple a list.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from schedc.ir.json_reader import JsonReader, short

_LARGEST, _LARGEST_BYTES, _LARGEST_FLOAT = 2**31, 2**63, 2.0**100
"""Integers, those of fields called ``bytes``, and other numbers lie below these."""
_LONGEST = 2**20
"""The most elements of a list."""


def fields_of(value: Any) -> Any:
    """A value as JSON takes it."""
    if isinstance(value, Enum):
        return value.value
    kind: Any = type(value)
    if names := _fields(kind):
        said = ((name, getattr(value, name), default) for name, (_, default) in names.items())
        return {name: fields_of(own) for name, own, default in said if own != default}
    return [fields_of(item) for item in value] if isinstance(value, tuple) else value


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, Any]]:
    """Type and default, or MISSING, of each field; empty for a kind without fields."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: (hints[field.name], field.default) for field in fields(kind)}
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        return {name: (hints[name], kind._field_defaults.get(name, MISSING)) for name in kind._fields}
    return {}


def read_value(reader: JsonReader, kind: Any, value: Any, path: str) -> Any:
    """The value of a type. Unknown fields, and values of a wrong type, fail at their path."""
    if get_origin(kind) is UnionType:
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        items = reader.items(value, path)
        if len(items) > _LONGEST:
            reader.fail(path, f"more than {_LONGEST} elements")
        return tuple(read_value(reader, get_args(kind)[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    if known := _fields(kind):
        needed = [name for name, (_, default) in known.items() if default is MISSING]
        given = reader.fields(value, path, needed, optional=known)
        return kind(**{name: read_value(reader, known[name][0], own, f"{path}.{name}") for name, own in given.items()})
    if issubclass(kind, Enum):
        words = [each.value for each in kind]
        if value not in words:
            reader.fail(path, f"{short(value)} is not known here", help=f"write {', '.join(words)}")
        return kind(value)
    return _plain(reader, kind, value, path)


def _plain(reader: JsonReader, kind: type, value: Any, path: str) -> Any:
    """A text, a truth or a number that is not negative."""
    if kind is str:
        return reader.string(value, path)
    if kind is bool:
        if type(value) is not bool:
            reader.fail(path, "true or false is expected")
        return value
    if kind is int:
        return reader.integer(value, path, 0, _LARGEST_BYTES if path.endswith(".bytes") else _LARGEST)
    if type(value) not in (int, float) or not 0 <= value < _LARGEST_FLOAT:
        reader.fail(path, f"{short(value)} is no number from 0")
    return float(value)
