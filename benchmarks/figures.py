"""The command line of the benchmarks: a parser with `--json`, and figures as one JSON object or as lines to read."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
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


def run_word(description: str | None, words: Mapping[str, str]) -> None:
    """The main function of a benchmark of several words. words: `module:function` by word.

    A function returns `cases`, `failed` and the word's own figures. It may take `cases`, a number, and `record`, the
    path of a file. The exit status is 1 where a case failed.
    """
    parser = parser_of(description)
    parser.add_argument("word", choices=sorted(words))
    parser.add_argument("--cases", type=int, help="number of cases, where the word takes it")
    parser.add_argument("--record", type=Path, help="file of finished cases, where the word takes it")
    args = parser.parse_args()
    module, _, name = words[args.word].partition(":")
    judge: Callable[..., dict[str, Any]] = getattr(import_module(module), name)
    given = {name: value for name in ("cases", "record") if (value := getattr(args, name)) is not None}
    if unknown := [f"--{name}" for name in given if name not in signature(judge).parameters]:
        parser.error(f"`{args.word}` takes no {' and no '.join(unknown)}")
    start = sum(os.times()[:4])
    with stdout_as_stderr():
        figures = judge(**given)
    give({**figures, "seconds": round(sum(os.times()[:4]) - start, 1)}, args)
    sys.exit(1 if figures["failed"] else 0)


@contextmanager
def stdout_as_stderr() -> Iterator[None]:
    """Sends to stderr what this process and its children print, so that stdout has the figures alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
