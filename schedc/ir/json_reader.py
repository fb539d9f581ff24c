"""Checks of values out of JSON, and values of frozen dataclasses, such as a plan, as JSON takes them.

An object leaves out fields that have their default. An enumeration is its word, a tuple a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.source import NOWHERE, Source, Span

VERSION = 3
"""The version that is written: the plan is a value."""
OLD_VERSIONS = (1, 2)
"""Versions whose plan is a text: with works the second, else the first."""
WITH_WORKS = 2
_LONGEST_TEXT = 1 << 29
_LARGEST, _LARGEST_BYTES, _LARGEST_FLOAT = 2**31, 2**63, 2.0**100
"""Integers, those of fields called ``bytes``, and other numbers lie below these."""
_LONGEST = 2**20
"""The most elements of a list."""


@dataclass(frozen=True)
class Schema:
    """A form's name in files, the code of findings, and the remedy."""

    name: str
    code: str
    remedy: str


class JsonReader:
    """Checks of JSON values; every failure names the place as a path, such as ``streams[2].peer``."""

    def __init__(self, source: Source, schema: Schema) -> None:
        self.source = source
        self.schema = schema

    def fail(self, path: str, message: str, code: str = "", help: str = "", span: Span = NOWHERE) -> NoReturn:
        text = f"{path}: {message}" if path else message
        label = Label(span, "here")
        raise DiagnosticError([Diagnostic(code or self.schema.code, text, label, help=help, source=self.source)])

    def parse(self) -> Any:
        if len(self.source.text) > _LONGEST_TEXT:
            self.fail("", f"longer than {_LONGEST_TEXT} characters")
        try:
            return json.loads(self.source.text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
        except json.JSONDecodeError as error:
            place = Span(error.lineno, error.colno, error.lineno, error.colno + 1)
            self.fail("", f"not JSON: {error.msg}", span=place)
        except (ValueError, RecursionError) as error:
            self.fail("", f"not a program: {error}")

    def top(self) -> dict[str, Any]:
        """The object that the text holds. A foreign schema or version is refused."""
        top, schema = self.parse(), self.schema
        if not isinstance(top, dict):
            self.fail("", "an object is expected")
        name, version = top.get("schema"), top.get("version")
        if name != schema.name:
            self.fail("schema", f"{short(name)} is not {schema.name}", "S392", schema.remedy)
        if type(version) is not int or version not in (*OLD_VERSIONS, VERSION):
            known = f"{', '.join(map(str, OLD_VERSIONS))} and {VERSION}"
            self.fail("version", f"{short(version)} is not a version that this schedc reads ({known})", "S392",
                      "compile the schedule again with this schedc")  # fmt: skip
        return top

    def fields(self, value: Any, path: str, names: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
        """An object with these fields, and any ``optional`` ones."""
        if not isinstance(value, dict):
            self.fail(path, "an object is expected")
        known = (*names, *optional)
        if unknown := sorted(value.keys() - set(known)):
            self.fail(path, f"unknown field `{unknown[0]}`", help=did_you_mean(unknown[0], known))
        if missing := [name for name in names if name not in value]:
            self.fail(path, f"field `{missing[0]}` is missing")
        return value

    def items(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(path, "a list is expected")
        return value

    def string(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            self.fail(path, "a string is expected")
        return value

    def words(self, value: Any, path: str, known: Sequence[str], what: str) -> list[int]:
        """A list of words, as their positions among those known."""
        items, place = self.items(value, path), {word: number for number, word in enumerate(known)}
        for i, item in enumerate(items):
            if type(item) is not str or item not in place:
                self.fail(f"{path}[{i}]", f"{short(item)} is no {what}", help=f"known: {', '.join(known)}")
        return [place[item] for item in items]

    def integer(self, value: Any, path: str, low: int, high: int) -> int:
        """An integer in low ..< high."""
        if type(value) is not int:
            self.fail(path, f"{short(value)} is not an integer")
        if not low <= value < high:
            self.fail(path, f"{value} is not in {low} ..< {high}")
        return value

    def integers(self, value: Any, path: str, low: int, high: int) -> list[int]:
        """A list of integers in low ..< high (true, false and 1.0 are none)."""
        items = self.items(value, path)
        if not set(map(type, items)) <= {int} or (items and not low <= min(items) <= max(items) < high):
            for i, item in enumerate(items):
                self.integer(item, f"{path}[{i}]", low, high)
        return items


def compact(value: object) -> str:
    """The value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field occurs twice in one object")
    return fields


def short(value: Any) -> str:
    """A foreign value as messages show it."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 40 else text[:40] + "…"


def fields_of(value: Any) -> Any:
    """A value as JSON takes it."""
    if isinstance(value, Enum):
        return value.value
    kind: Any = type(value)
    if names := fields_by_name(kind):
        said = ((name, getattr(value, name), default) for name, (_, default) in names.items())
        return {name: fields_of(own) for name, own, default in said if own != default}
    return [fields_of(item) for item in value] if isinstance(value, tuple) else value


@cache
def fields_by_name(kind: Any) -> dict[str, tuple[Any, Any]]:
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
    if known := fields_by_name(kind):
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
