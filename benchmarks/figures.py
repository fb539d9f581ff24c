"""The command line of the benchmarks: a parser with `--json`, and figures as one JSON object or as lines to read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser that prints the description as it is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def give(figures: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print the figures as `--json` asks."""
    print(json.dumps(figures) if options.json else "\n".join(lines(figures)))


def lines(figures: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """One line for each figure, deeper ones indented; a list of mappings is a table."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from lines(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{name}:"
            yield from table(value, indent + "  ")
        else:
            yield f"{indent}{name:<24} {text(value)}"


def table(rows: Sequence[Mapping[str, Any]], indent: str = "") -> Iterator[str]:
    """Rows below a line of names. Mappings and lists inside of a row are left to `--json`."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if _plain(rows, name)]
    cells = [names, *([text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield (indent + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))).rstrip()


def _plain(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return not any(isinstance(row.get(name), Mapping | list | tuple) for row in rows)


def text(value: Any) -> str:
    """A figure with four digits."""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
