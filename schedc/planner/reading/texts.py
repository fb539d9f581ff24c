"""Reads a text of bounded length, and the table in it: JSON or TOML, with every way in which it is none."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.source import NOWHERE, Source

MOST_BYTES = 1_000_000
"""Longer files are not read: models and clusters take a few kB."""


class _NotJson(ValueError):
    """A number or an object that JSON has, or some writers have, and that has no one meaning."""


def read_source(path: Path, code: str, what: str) -> Source:
    """The text of a file. Raises `DiagnosticError` (``code``) for one that cannot be read, or has over 1 MB.

    what: "model", "cluster" or "file of rows", for example, for the message.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _refused(code, f"cannot read the {what} `{path}`: {error}", "name a file that can be read") from error
    if len(raw) > MOST_BYTES:
        message = f"the {what} `{path}` has more than {MOST_BYTES:,} bytes"
        help = "name the file with the sizes, not that with the weights" if what == "model" else "write a shorter file"
        raise _refused(code, message, help)
    try:
        return Source(str(path), raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _refused(code, f"the {what} `{path}` is not UTF-8: {error}", "name a text file") from error


def parse_json(source: Source, code: str) -> dict[str, Any]:
    """The object of a JSON text. Raises `DiagnosticError` (``code``) for anything else, NaN and 1e400 included."""
    try:
        value = json.loads(
            source.text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_without_repeats
        )
    except json.JSONDecodeError as error:
        label = Label(source.span_at(error.pos, min(error.pos + 1, len(source.text))))
        message, help = f"not JSON: {error.msg}", "write one JSON object, as `config.json` of a model has it"
        raise DiagnosticError([Diagnostic(code, message, label, help=help, source=source)]) from error
    except _NotJson as error:
        raise _at_start(source, code, str(error), "write each key once, with a finite number") from error
    except (ValueError, RecursionError) as error:
        message = "nested too deeply" if isinstance(error, RecursionError) else "a number of too many digits"
        raise _at_start(source, code, f"not the sizes of a model: {message}", "write plain numbers") from error
    if not isinstance(value, dict):
        raise _at_start(source, code, f"a JSON {type(value).__name__}, not an object", "write one object: {...}")
    return value


def parse_table(source: Source, code: str, schema: str, *former: str) -> dict[str, Any]:
    """The TOML text as a table. Its key ``schema`` stays only where several are read: ``former`` ones, too.

    Raises `DiagnosticError` (``code``) if it has none of them.
    """
    try:
        table = tomllib.loads(source.text)
    except (ValueError, RecursionError) as error:  # tomllib's own error is a ValueError
        message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _at_start(source, code, f"not TOML: {message}", "docs/guide/planner.md has an example") from error
    named = table.get("schema")
    if named not in (schema, *former):
        text = "no schema" if named is None else f"schema {named!r}"
        raise _at_start(source, code, f"a file with {text}", f'write schema = "{schema}"')
    if not former:
        del table["schema"]
    return table


def _no_number(text: str) -> Any:
    raise _NotJson(f"`{text}` is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise _NotJson(f"`{text[:40]}` is larger than any number here")
    return number


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise _NotJson(f"`{key}` is set twice")
        table[key] = value
    return table


def _at_start(source: Source, code: str, message: str, help: str) -> DiagnosticError:
    label = Label(source.span_at(0, min(len(source.lines[0]), 80)))
    return DiagnosticError([Diagnostic(code, message, label, help=help, source=source)])


def _refused(code: str, message: str, help: str) -> DiagnosticError:
    return DiagnosticError([Diagnostic(code, message, Label(NOWHERE), help=help)])
