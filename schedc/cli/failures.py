"""What stands on stdout where JSON was asked for and the command cannot give it: wrong usage, findings, faults."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import click

from schedc.cli.screen import coloured, painter

if TYPE_CHECKING:
    from schedc.diagnostics import Diagnostic

_WORDS, _PRINTED = "schedc.words", "schedc.failure_printed"


class WrongUsage(click.UsageError):
    """Wrong usage in the style of diagnostics: what is wrong, and where the options are listed."""

    def __init__(self, error: click.UsageError, hint: str = "") -> None:
        super().__init__(" ".join(f"{error.format_message()} {hint}".split()), error.ctx)
        self.coloured = coloured(sys.stderr)

    def show(self, file: IO[Any] | None = None) -> None:
        from schedc.diagnostics import clean

        paint = painter(self.coloured)
        lines = [f"{paint('error', 'error')}{paint('message', f': {clean(self.message)}')}"]
        if self.ctx is not None:
            told = f"`{self.ctx.command_path} --help` has the options"
            lines.append(f"  {paint('gutter', '=')} {paint('help', 'help')}: {told}")
        click.echo("\n".join(lines), file=file, err=True, color=self.coloured or None)


def keep_words(ctx: click.Context, words: list[str]) -> None:
    """Keeps the command line, which is not parsed where an option is wrong."""
    ctx.meta[_WORDS] = tuple(words)


def print_failed(facts: dict[str, object]) -> None:
    """Prints what a command has in place of its own output. `print_failure` then prints nothing more."""
    click.get_current_context().meta[_PRINTED] = True
    click.echo(json.dumps(facts))


def print_failure(ctx: click.Context, status: int, usage: str = "", found: tuple[Diagnostic, ...] = ()) -> None:
    """Prints one object where JSON was asked for and nothing was printed. status: the exit status to come.

    usage: what is wrong with the command line; empty where nothing is.
    """
    words = ctx.meta.get(_WORDS, ())
    if not _ask_json(words) or ctx.meta.get(_PRINTED):
        return
    from schedc.fixes import finding_json

    head = {"schema": "schedc.failure", "version": 1, "command": words[0], "status": status, "usage": usage or None}
    click.echo(json.dumps({**head, "diagnostics": [finding_json(each) for each in found]}))


def _ask_json(words: tuple[str, ...]) -> bool:
    """Whether a command line asks for JSON. `--format json` is a form of findings for `check` alone."""
    own = words[: words.index("--")] if "--" in words else words
    form = own[:1] == ("check",) and ("--format=json" in own or ("--format", "json") in pairwise(own))
    return form or "--json" in own
