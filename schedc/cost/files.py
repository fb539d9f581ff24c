"""Cost files: TOML texts of schema ``schedc.costs/1`` that people write and that a measured run writes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from schedc.cost.costs import MEMORY, TIMES, Cost, Costs, problem, validated
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.source import Source

SCHEMA = "schedc.costs/1"


def load_costs(path: str | Path) -> Costs:
    """The costs of a file; raises `DiagnosticError` for a file that cannot be read (S405) or is wrong."""
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        unreadable = problem("S405", f"cannot read the cost file `{path}`: {error}", None)
        raise DiagnosticError([unreadable]) from error
    return parse_costs(Source(str(path), text))


def parse_costs(source: Source) -> Costs:
    """The costs of a TOML text.

    Keys: ``schema``; F, I, W, B, FB, p2p, each a number or (but p2p) a list with one number per stage; table
    ``[memory]`` with activation and pending_weight. Every key but the schema may be left out.
    Raises `DiagnosticError` with everything that is wrong (S401, S402, S405).
    """
    values = _toml(source)
    schema, memory = values.pop("schema", None), values.pop("memory", {})
    found: list[Diagnostic] = []
    if schema != SCHEMA:
        said = "no schema" if schema is None else f"schema {schema!r}"
        found.append(problem("S405", f"a cost file with {said}", source, "schema", help=f'write schema = "{SCHEMA}"'))
    if not isinstance(memory, dict):
        found.append(problem("S402", "`memory` is not a table", source, "memory", help="write [memory]"))
        memory = {}
    times, wrong_times = validated(values, TIMES, source)
    held, wrong_memory = validated(memory, MEMORY, source)
    if found := found + wrong_times + wrong_memory:
        raise DiagnosticError(found)
    return Costs(**times, **held, source=source)  # type: ignore[arg-type]


def dump_costs(costs: Costs) -> str:
    """The TOML text of ``costs``; `parse_costs` gives back an equal value."""

    def lines(keys: tuple[str, ...]) -> list[str]:
        return [f"{key} = {_number(value)}" for key in keys if (value := getattr(costs, key)) is not None]

    return "\n".join([f'schema = "{SCHEMA}"', *lines(TIMES), "", "[memory]", *lines(MEMORY), ""])


def _number(cost: Cost) -> str:
    return f"[{', '.join(repr(float(c)) for c in cost)}]" if isinstance(cost, tuple) else repr(float(cost))


def _toml(source: Source) -> dict[str, Any]:
    try:
        return tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(place[1]), int(place[2])) if place else (len(source.lines), 1)
        start = sum(len(text) + 1 for text in source.lines[: line - 1]) + column - 1
        start = min(start, len(source.text))
        raise DiagnosticError([
            Diagnostic("S405", f"not TOML: {str(error).split(' (at')[0]}",
                       Label(source.span_at(start, min(start + 1, len(source.text)))), source=source)
        ]) from error  # fmt: skip
