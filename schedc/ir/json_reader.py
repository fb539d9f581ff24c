"""Checks of values out of JSON: every failure names its place as a path, such as ``streams[2].peer``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.source import NOWHERE, Source, Span

VERSION = 3
"""The version that is written: the plan is a value."""
OLD_VERSIONS = (1, 2)
"""Versions whose plan is a text: with works the second, else the first."""
WITH_WORKS = 2
_LONGEST_TEXT = 1 << 29


@dataclass(frozen=True)
class Schema:
    """What tells a form from others, the code of what is wrong with it, and what writes it."""

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
