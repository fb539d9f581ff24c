"""Completes names of schedules, sizes and codes in a shell; click writes the scripts (docs/guide/editing.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_schedule(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The library's names, and files."""
    from click.shell_completion import CompletionItem

    from schedc.load.library import names

    found = [CompletionItem(name) for name in names() if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")]


def complete_size(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``P=4`` for each size of the schedule that stands on the line, with its default."""
    from click.shell_completion import CompletionItem

    from schedc.diagnostics import DiagnosticError
    from schedc.inputs import open_input

    loose = (word for word in ctx.args if not word.startswith("-"))  # click leaves it there while an option is open
    given = ctx.params.get("schedule") or next(loose, None)
    if not given:
        return []
    try:
        parameters = open_input(given).parameters
    except DiagnosticError:
        return []
    texts = [(p, f"{p.name}={'' if p.default is None else p.default}") for p in parameters]
    return [CompletionItem(text, help=p.role) for p, text in texts if text.startswith(incomplete)]
