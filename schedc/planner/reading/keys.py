"""Takes values from a table of a file by their keys: checked, with a finding in its place for each that is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Any, TypeVar

from schedc.diagnostics import Diagnostic, DiagnosticError, Label, did_you_mean
from schedc.source import NOWHERE, Source, Span

T = TypeVar("T")

LARGEST = 2**40
"""Larger sizes are refused: no model and no cluster has them."""

LARGEST_NUMBER = 1e30
"""Larger figures are refused."""


@dataclass
class Keys:
    """The values of one table, and findings about them.

    code: that of the findings. name: of the table, empty for the whole file. taken: the keys that were asked for.
    """

    table: Mapping[str, Any]
    source: Source
    code: str
    name: str = ""
    findings: list[Diagnostic] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def key_of(self, *names: str) -> str:
        """The first of these names that the table has with a value; else the first."""
        self.taken.update(names)
        return next((name for name in names if self.table.get(name) is not None), names[0])

    def has(self, *names: str) -> bool:
        """Whether the table has a value for one of these names."""
        return self.table.get(self.key_of(*names)) is not None

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """A whole number. Without a default it is a finding if the table has none."""
        value = self._value(names, default)
        if value is None:
            return least
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            return self._wrong(names, f"is {_shown(value)}, not a whole number", least, "write one whole number")
        if not least <= value <= most:
            return self._wrong(names, f"is {_shown(value)}", least, f"write a whole number from {least:,} to {most:,}")
        return value

    def number(
        self, *names: str, default: float | None = None, above: float = 0.0, most: float = LARGEST_NUMBER
    ) -> float:
        """A number that is larger than ``above``."""
        value = self._value(names, default)
        if value is None:
            return above
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._wrong(names, f"is {_shown(value)}, not a number", above, "write one number")
        if not (above < value <= most and isfinite(value)):
            return self._wrong(names, f"is {_shown(value)}", above, f"write a number above {above:g}, {most:g} at most")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """A truth value; a finding if it is of another kind."""
        value = self._value(names, default)
        return (
            value
            if isinstance(value, bool)
            else self._wrong(names, f"is {_shown(value)}", default, "write true or false")
        )

    def text(self, *names: str, default: str = "", among: Iterable[str] = ()) -> str:
        """A text, one of ``among`` if these are given."""
        value = self._value(names, default)
        if not isinstance(value, str):
            return self._wrong(names, f"is {_shown(value)}, not a text", default, "write it in quotes")
        if (known := tuple(among)) and value not in known:
            return self._wrong(
                names, f"is {_shown(value)}", default, did_you_mean(value, known) or f"one of {', '.join(known)}"
            )
        return value

    def integers(self, *names: str, most: int = LARGEST) -> tuple[int, ...]:
        """A list of whole numbers from 0; empty if the table has none."""
        value = self._value(names, [])
        if not isinstance(value, list) or not all(
            isinstance(each, int) and not isinstance(each, bool) for each in value
        ):
            return self._wrong(names, f"is {_shown(value)}, not a list of whole numbers", (), "write [0, 1]")
        if any(not 0 <= each <= most for each in value):
            return self._wrong(names, f"has numbers beyond 0 to {most:,}", (), f"write numbers from 0 to {most:,}")
        return tuple(value)

    def numbers(self, *names: str) -> tuple[float, ...]:
        """A list of finite numbers; empty, and a finding, if the table has none."""
        value = self._value(names, None)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(each, int | float) and not isinstance(each, bool) and abs(each) <= LARGEST_NUMBER
            for each in value
        ):
            return self._wrong(names, f"is {_shown(value)}, not a list of numbers", (), "write [0.5, 1.0]")
        return tuple(map(float, value))

    def inner(self, name: str) -> Keys | None:
        """The values of a table in this one; None if it has none."""
        value = self._value((name,), {})
        if isinstance(value, dict):
            inside = f"{self.name}.{name}" if self.name else name
            return Keys(value, self.source, self.code, inside, self.findings) if value else None
        self._wrong((name,), f"is {_shown(value)}, not a table", None, f"write [{name}]")
        return None

    def row(self, name: str, number: int) -> Keys:
        """The values of a table in a list of tables, by its number from 0."""
        return Keys(self.table[name][number], self.source, self.code, f"{name}[{number}]", self.findings)

    def rest(self) -> list[str]:
        """The keys that nobody asked for, in the order of the file."""
        return [key for key in self.table if key not in self.taken]

    def refuse_rest(self) -> None:
        """Makes a finding of each key that nobody asked for."""
        for key in self.rest():
            self.say(key, f"`{_of(self.name, key)}` is no key of this file", did_you_mean(key, sorted(self.taken)))

    def say(self, key: str, message: str, help: str = "", code: str = "") -> None:
        """Adds a finding in the place of a key."""
        label = Label(place_of(self.source, key, self.name))
        self.findings.append(Diagnostic(code or self.code, message, label, help=help, source=self.source))

    def stop(self) -> None:
        """Raises `DiagnosticError` if anything was wrong."""
        if self.findings:
            raise DiagnosticError(sorted(self.findings, key=lambda finding: finding.primary.span))

    def _value(self, names: tuple[str, ...], default: Any) -> Any:
        """The value of the first name with one, or the default; None, and a finding, if there is neither."""
        value = self.table.get(self.key_of(*names))
        if value is None:
            value = default
        if value is None:
            others = f" (or {', '.join(f'`{name}`' for name in names[1:])})" if names[1:] else ""
            self.say(names[0], f"no `{_of(self.name, names[0])}`{others}", "add it")
        return value

    def _wrong(self, names: tuple[str, ...], message: str, instead: T, help: str) -> T:
        key = self.key_of(*names)
        self.say(key, f"`{_of(self.name, key)}` {message}", help)
        return instead


def place_of(source: Source, key: str, table: str = "") -> Span:
    """Where a key is set in a JSON or TOML text, behind the head of its table; else the start of the text."""
    start = 0
    inner, _, number = table.rpartition(".")[2].partition("[")
    if inner:
        heads = re.finditer(rf"^[ \t]*\[+[\w.\" ]*\b{re.escape(inner)}\b[^\n]*", source.text, re.MULTILINE)
        start = next(islice((head.end() for head in heads), int(number.rstrip("]") or 0), None), 0)
    quoted = re.escape(key)
    form = rf"(?:(?<=[\s,{{])|^)(?:\"{quoted}\"[ \t]*[:=]|{quoted}[ \t]*=|\[+{quoted}\])[ \t]*[^\n,]*"
    found = re.compile(form, re.MULTILINE).search(source.text, start) if key else None
    if found is None:
        return source.span_at(0, min(len(source.lines[0]), 80)) if source.text else NOWHERE
    end = min(found.end(), found.start() + 120)
    return source.span_at(found.start(), found.start() + len(source.text[found.start() : end].rstrip()))


def _of(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _shown(value: Any) -> str:
    """A value in a message, cut where it is long. Python may not write integers of many digits."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}..."
