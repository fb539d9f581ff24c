"""SCHEDULE arguments: names and paths as they are, and the text of a pipe, which is read once."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from schedc.cli.completion import complete_schedule

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from schedc.load.library import Text
    from schedc.source import Source

STANDARD_INPUT = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
"""Paths that mean standard input. `/dev/stdin:NAME` chooses one of the schedules and plans in it."""


class ScheduleArgument(click.ParamType):  # type: ignore[type-arg]
    """The name or path of a schedule as `str`, or as `schedc.load.library.Text` what a pipe held."""

    name = "schedule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | Text:
        if not isinstance(value, str) or (ctx is not None and ctx.resilient_parsing):
            return value  # type: ignore[no-any-return]
        path, colon, wanted = value.rpartition(":")
        if not (colon and path in STANDARD_INPUT):
            path, wanted = value, ""
        if not is_stream(path):
            return value
        from schedc.load.library import Text

        texts: dict[str, Source] = {} if ctx is None else ctx.meta.setdefault("schedc.streams", {})
        name = "<stdin>" if path in STANDARD_INPUT else path
        if name not in texts:  # a pipe can be read once; two arguments may mean the same
            texts[name] = read_stream(path)
        return Text(texts[name], wanted)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete_schedule(ctx, param, incomplete)


def is_stream(path: str) -> bool:
    """Whether the path is standard input, a named pipe or a device, which can be read only once."""
    if path in STANDARD_INPUT:
        return True
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def read_stream(path: str) -> Source:
    """The whole text of standard input, or of a pipe.

    Raises `RequestError` (S122) for input that is too large or no text, and `click.UsageError` if standard input is
    closed.
    """
    from schedc.inputs import read

    if path in STANDARD_INPUT:
        if sys.stdin is None:
            raise click.UsageError("standard input is closed")
        return read(sys.stdin.buffer, "<stdin>")
    with open(path, "rb") as file:
        return read(file, path)
