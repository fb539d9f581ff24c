"""The abilities of a terminal, file or pipe that text goes to: its width and its number of colours."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from schedc.draw.ansi import CUBE, PLAIN, TRUE

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

    NO_COLOR (no-color.org) forbids colours, and takes precedence. FORCE_COLOR (force-color.org) and CLICOLOR_FORCE
    demand them, even for a pipe, unless they are 0. TERM=dumb is a terminal without colours.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


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
    """The number of colours of a drawing (`schedc.draw.ansi`); see `coloured`.

    A file has none, and neither has a stream whose encoding lacks block elements.
    """
    if output is not None or not coloured(sys.stdout):
        return PLAIN
    try:
        "▌░▒≈".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN
    return TRUE if os.environ.get("COLORTERM") in {"truecolor", "24bit"} else CUBE
