"""The abilities of a terminal, file or pipe that text goes to: width and number of colours."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from schedc.drawing.ansi import CUBE, PLAIN, TRUE

if TYPE_CHECKING:
    from schedc.diagnostics import Paint

_PAGE = 100
"""Characters in a line of a file."""


def width_of(output: Path | None) -> int:
    """Characters in a line: those of the terminal (or COLUMNS), or of a page for a file or a pipe."""
    terminal = output is None and sys.stdout.isatty()
    return shutil.get_terminal_size((_PAGE, 24)).columns if terminal or "COLUMNS" in os.environ else _PAGE


def coloured(stream: TextIO) -> bool:
    """Whether to write colours to a stream: to a terminal that has them, unless the environment decides otherwise.

    --color goes before all else. NO_COLOR (no-color.org) forbids colours, and takes precedence. FORCE_COLOR
    (force-color.org) and CLICOLOR_FORCE demand them, even for a pipe, unless they are 0. TERM=dumb is a terminal
    without colours.
    """
    asked = _asked("color")
    if asked in ("always", "never"):
        return bool(asked == "always")
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _asked(option: str) -> Any:
    """The value of an option that every command has; None where it is not given."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(f"schedc.{option}")


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None:
        ctx.meta[f"schedc.{parameter.name}"] = value


def options_of_all() -> list[click.Parameter]:
    """The options that every command has."""
    quiet = click.Option(
        ["-q", "--quiet"], is_flag=True, default=None, is_eager=True, expose_value=False, callback=_keep,
        help="Print results and findings alone, without notes and progress.",
    )  # fmt: skip
    color = click.Option(
        ["--color"], type=click.Choice(["auto", "always", "never"]), is_eager=True, expose_value=False, callback=_keep,
        help="Whether text has colours; auto, the default, asks terminal and environment.",
    )  # fmt: skip
    return [quiet, color]


def is_quiet() -> bool:
    """Whether notes and progress are left out."""
    return bool(_asked("quiet"))


def write_note(text: str) -> None:
    """Writes a line on stderr that is neither a result nor a finding."""
    if not is_quiet():
        click.echo(text, err=True)


_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "error": {"fg": "red", "bold": True},
    "message": {"bold": True},
    "gutter": {"fg": "blue"},
    "mark": {"fg": "red", "bold": True},
    "other": {"fg": "blue"},
    "help": {"fg": "green", "bold": True},
}
"""The look of each role of `schedc.diagnostics.Paint`."""


def painter(colours: bool) -> Paint:
    """The function with which `schedc.diagnostics.render` styles the parts of a diagnostic."""
    from schedc.diagnostics import plain

    return (lambda role, text: click.style(text, **_LOOKS[role])) if colours else plain


def colours_of(output: Path | None) -> int:
    """The number of colours of a drawing (`schedc.drawing.ansi`); see `coloured`.

    A file has none, and neither has a stream whose encoding lacks block elements.
    """
    if output is not None or not coloured(sys.stdout):
        return PLAIN
    try:
        "▌░▒≈".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN
    return TRUE if os.environ.get("COLORTERM") in {"truecolor", "24bit"} else CUBE
