"""Formats of drawings: choice by -o and --format, requirements, and conversion of an SVG."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from schedc.cli.common import write
from schedc.cli.screen import write_note

SVG, PNG, PDF, HTML, TERM, DOT = "svg", "png", "pdf", "html", "term", "dot"

PICTURES = (SVG, PNG, PDF)
FORMS_OF_CHARTS = (*PICTURES, HTML, TERM)
"""Formats of a schedule over time."""
FORMS_OF_CELLS = (*PICTURES, TERM)
"""Formats of the inside of one cell."""
FORMS_OF_GRAPHS = (*PICTURES, DOT)
"""Formats of a graph."""
FORMATS = (*FORMS_OF_CHARTS, DOT)

SUFFIXES: Mapping[str, str] = {
    ".svg": SVG, ".png": PNG, ".pdf": PDF, ".html": HTML, ".htm": HTML, ".txt": TERM, ".dot": DOT, ".gv": DOT,
}  # fmt: skip
"""The format by the suffix of a file."""

NARROWEST, WIDEST = 400, 20_000
"""px, the least and the greatest that --width takes. A test compares `schedc.drawing.layout.NARROWEST`."""

F = TypeVar("F", bound=Callable[..., Any])


def format_option(command: F) -> F:
    """Adds --format, which the command gets as ``wanted``."""
    return click.option(
        "--format",
        "wanted",
        type=click.Choice(FORMATS),
        help="svg, png, pdf: a picture (png and pdf need the extra `pictures`). html: one offline page with zoom, "
        "hover and the reason for each wait. term: the terminal. dot: the source of a graph. Default: by the suffix "
        "of -o; without -o the terminal, and svg into a pipe.",
    )(command)


def width_option(command: F) -> F:
    """Adds --width, which the command gets as ``width``: px, or None."""
    return click.option(
        "--width",
        type=click.IntRange(NARROWEST, WIDEST),
        metavar="PX",
        help="Width of the picture in px: lanes are laid out anew, graphs are scaled. Default: as wide as it needs.",
    )(command)


def format_of(
    wanted: str | None, output: Path | None, able: Sequence[str] = FORMS_OF_CHARTS, what: str = "a chart"
) -> str:
    """The format of ``what`` by --format, or by the output's suffix.

    Without both it is the terminal's where stdout is one and ``what`` can be drawn there, and else SVG.

    able: the formats that ``what`` can have. Raises `click.UsageError` for a suffix that names no format or another one
    than --format, and for a format that ``what`` cannot have.
    """
    suffix = output.suffix.lower() if output else ""
    named = SUFFIXES.get(suffix)
    if suffix and not named and not wanted:
        raise click.UsageError(f"-o {output}: {suffix} is no format of a drawing; {_can_be(what, able)}")
    if wanted and named and wanted != named:
        raise click.UsageError(f"-o {output} is a name for {named}, but --format says {wanted}: change one of them")
    drawn_here = output is None and TERM in able and sys.stdout.isatty()
    form = wanted or named or (TERM if drawn_here else SVG)
    if form not in able:
        raise click.UsageError(f"{what} cannot be {form}: {_can_be(what, able)}")
    return form


def _can_be(what: str, able: Sequence[str]) -> str:
    suffixes = ", ".join(suffix for suffix, form in SUFFIXES.items() if form in able)
    return f"{what} is written as {', '.join(able)} (--format), by the suffixes {suffixes}"


def check_width(width: int | None, form: str) -> None:
    """Raises `click.UsageError` for --width with a format that is no picture."""
    if width is not None and form not in PICTURES:
        raise click.UsageError(f"--width is the width of a picture ({', '.join(PICTURES)}), not of {form}")


def check_converter(form: str) -> None:
    """Raises `click.UsageError` for PNG or PDF without CairoSVG, or without the library that CairoSVG calls."""
    if form not in (PNG, PDF):
        return
    try:
        import cairosvg  # noqa: F401
    except ImportError:
        raise click.UsageError(
            f"{form.upper()} is written by CairoSVG: pip install 'schedc[pictures]', or write .svg"
        ) from None
    except OSError:
        raise click.UsageError(
            f"{form.upper()} needs the library cairo: install it (apt-get install libcairo2, brew install cairo),"
            " or write .svg"
        ) from None


class Drawing(NamedTuple):
    """The content to write, and a note on what it leaves out; the note is empty if it shows everything."""

    content: str | bytes
    note: str = ""


def in_form(svg: str, form: str) -> str | bytes:
    """An SVG, converted to a format of `PICTURES`."""
    if form == SVG:
        return svg
    from schedc.drawing.raster import converted

    return converted(svg, form)


def write_drawing(drawing: Drawing, output: Path | None) -> None:
    """Writes a drawing to a file, else to stdout; its note goes to stderr."""
    write(drawing.content, output)
    if drawing.note:
        write_note(f"note: {drawing.note}")
