"""What stands on stdout where JSON was asked for and the command cannot give it: wrong usage, findings, faults."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from schedc.diagnostics import Diagnostic

_WORDS, _PRINTED = "schedc.words", "schedc.failure_printed"


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
