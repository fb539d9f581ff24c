"""What the place that text goes to can show: its width, and how many colours it has."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from schedc.draw.ansi import CUBE, PLAIN, TRUE

_PAGE = 100
"""Characters in a line of a file."""


def width_of(output: Path | None) -> int:
    """Characters in a line: those of the terminal (or COLUMNS), or of a page for a file or a pipe."""
    terminal = output is None and sys.stdout.isatty()
    return shutil.get_terminal_size((_PAGE, 24)).columns if terminal or "COLUMNS" in os.environ else _PAGE


def colours_of(output: Path | None) -> int:
    """How many colours to write (`schedc.draw.ansi`): none unless to a terminal that has them and whose owner wants
    them. NO_COLOR (https://no-color.org), TERM=dumb and an encoding without block elements say no.
    """
    if output is not None or not sys.stdout.isatty():
        return PLAIN
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return PLAIN
    try:
        "▌░▒≈".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN
    return TRUE if os.environ.get("COLORTERM") in {"truecolor", "24bit"} else CUBE
