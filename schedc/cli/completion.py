"""Completion of schedules and sizes in a shell; click writes the scripts (docs/guide/editing.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_schedule(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the names of the library, and files."""
    from click.shell_completion import CompletionItem

    from schedc.load.library import names

    library = [CompletionItem(name) for name in names() if name.startswith(incomplete)]
    return [*library, CompletionItem(incomplete, type="file")]


def complete_size(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes sizes of the schedule on the line, with their defaults: ``P=4``."""
    from click.shell_completion import CompletionItem

    from schedc.diagnostics import DiagnosticError
    from schedc.inputs import open_input

    loose = (
        word for word in ctx.args if not word.startswith("-")
    )  # click leaves SCHEDULE there while an option is open
    name = ctx.params.get("schedule") or next(loose, None)
    if not name:
        return []
    try:
        parameters = open_input(name).parameters
    except DiagnosticError:
        return []
    texts = [(p, f"{p.name}={'' if p.default is None else p.default}") for p in parameters]
    return [CompletionItem(text, help=p.role) for p, text in texts if text.startswith(incomplete)]


def complete_model(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the names of shipped models, and files."""
    return _shipped("models", incomplete)


def complete_cluster(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the names of shipped clusters, and files."""
    return _shipped("clusters", incomplete)


def complete_restriction(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the names of shipped restrictions."""
    return _shipped("restrictions", incomplete)[:-1]


def complete_code(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes codes of diagnostics, each with its title."""
    from click.shell_completion import CompletionItem

    from schedc.codes import CODES

    named = incomplete.upper()
    return [CompletionItem(code, help=each.title) for code, each in CODES.items() if code.startswith(named)]


def complete_output(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the names of JSON outputs."""
    from click.shell_completion import CompletionItem

    from schedc.schemas.shapes import outputs

    return [CompletionItem(name) for name in outputs() if name.startswith(incomplete)]


def _shipped(kind: str, incomplete: str) -> list[CompletionItem]:
    """Completes the names of shipped files of a kind; the last item is a file of the user."""
    from click.shell_completion import CompletionItem

    from schedc.planner.presets.tables import files

    names = [CompletionItem(name) for name in files(kind) if name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]
