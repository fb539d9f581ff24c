"""What the place that text goes to can show: its width, and how many colours it has."""

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
    """Whether to write colours to a stream: a terminal that has them, unless its owner says otherwise.

    NO_COLOR (no-color.org) says no, before FORCE_COLOR (force-color.org) and CLICOLOR_FORCE, which say yes to a pipe
    too, unless they are 0. TERM=dumb is a terminal without colours.
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
"""How each role of `schedc.diagnostics.Paint` looks."""


def painter(colours: bool) -> Paint:
    """What `schedc.diagnostics.render` writes the parts of a diagnostic with."""
    from schedc.diagnostics import plain

    return (lambda role, text: click.style(text, **_LOOKS[role])) if colours else plain


def colours_of(output: Path | None) -> int:
    """How many colours a drawing has (`schedc.draw.ansi`): see `coloured`; none in a file, nor where block elements
    cannot be encoded.
    """
    if output is not None or not coloured(sys.stdout):
        return PLAIN
    try:
        "▌░▒≈".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN
    return TRUE if os.environ.get("COLORTERM") in {"truecolor", "24bit"} else CUBE
