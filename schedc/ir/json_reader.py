"""Checks of values out of JSON: every failure names its place as a path, such as ``streams[2].peer``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.source import NOWHERE, Source, Span

VERSION = 3
"""The version that is written: the plan is a value."""
OLD_VERSIONS = (1, 2)
"""Versions whose plan is a text: with works the second, else the first."""
_WITH_WORKS = 2
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

    def fields(
        self,
        value: Any,
        path: str,
        names: Iterable[str],
        identify: bool = False,
        together: Iterable[str] = (),
        optional: Iterable[str] = (),
    ) -> dict[str, Any]:
        """An object with these fields, all or none of those that stand ``together``, and any ``optional`` ones.

        identify: a foreign schema or version is said first.
        """
        if not isinstance(value, dict):
            self.fail(path, "an object is expected")
        if identify:
            self._identify(value)
        if not value.keys().isdisjoint(together):
            names = (*names, *together)
        if unknown := sorted(value.keys() - {*names, *optional}):
            self.fail(path, f"unknown field `{unknown[0]}`", help=did_you_mean(unknown[0], (*names, *optional)))
        if missing := [name for name in names if name not in value]:
            self.fail(path, f"field `{missing[0]}` is missing")
        return value

    def _identify(self, top: dict[str, Any]) -> None:
        name, version, schema = top.get("schema"), top.get("version"), self.schema
        if name != schema.name:
            self.fail("schema", f"{short(name)} is not {schema.name}", "S392", schema.remedy)
        if type(version) is not int or version not in (*OLD_VERSIONS, VERSION):
            known = f"{', '.join(map(str, OLD_VERSIONS))} and {VERSION}"
            self.fail("version", f"{short(version)} is not a version that this schedc reads ({known})", "S392",
                      "compile the schedule again with this schedc")  # fmt: skip
        if version in OLD_VERSIONS and ("works" in top) != (version == _WITH_WORKS):
            self.fail("works", f"version {_WITH_WORKS} has works, and version 1 has none")

    def items(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(path, "a list is expected")
        return value

    def string(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            self.fail(path, "a string is expected")
        return value

    def integers(self, value: Any, path: str, low: int, high: int) -> list[int]:
        """A list of integers in low ..< high (true, false and 1.0 are none)."""
        items = self.items(value, path)
        if not set(map(type, items)) <= {int}:
            index = next(i for i, item in enumerate(items) if type(item) is not int)
            self.fail(f"{path}[{index}]", f"{short(items[index])} is not an integer")
        if items and not low <= min(items) <= max(items) < high:
            index = next(i for i, item in enumerate(items) if not low <= item < high)
            self.fail(f"{path}[{index}]", f"{items[index]} is not in {low} ..< {high}")
        return items


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
