"""Formats of drawings: which one -o and --format ask for, what each needs, and an SVG turned into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from schedc.cli.common import write

SVG, PNG, PDF, HTML, TERM, DOT = "svg", "png", "pdf", "html", "term", "dot"

PICTURES = (SVG, PNG, PDF)
FORMS_OF_CHARTS = (*PICTURES, HTML, TERM)
"""Formats of a schedule in time."""
FORMS_OF_CELLS = (*PICTURES, TERM)
"""Formats of one cell from inside."""
FORMS_OF_GRAPHS = (*PICTURES, DOT)
"""Formats of a graph."""
FORMATS = (*FORMS_OF_CHARTS, DOT)

SUFFIXES: Mapping[str, str] = {
    ".svg": SVG, ".png": PNG, ".pdf": PDF, ".html": HTML, ".htm": HTML, ".txt": TERM, ".dot": DOT, ".gv": DOT,
}  # fmt: skip
"""Format by the suffix of a file."""

NARROWEST, WIDEST = 400, 20_000
"""px that --width takes; `schedc.draw.layout.NARROWEST` is the same number, which a test checks."""

F = TypeVar("F", bound=Callable[..., Any])


def format_option(command: F) -> F:
    """--format, as ``wanted``."""
    return click.option(
        "--format",
        "wanted",
        type=click.Choice(FORMATS),
        help="svg, png, pdf: a picture (png and pdf need the extra `pictures`). html: one offline page with zoom, "
        "hover and the reason for each wait. term: the terminal. dot: the source of a graph. Default: by the suffix "
        "of -o, else svg.",
    )(command)


def width_option(command: F) -> F:
    """--width, as ``width``: px or None."""
    return click.option(
        "--width",
        type=click.IntRange(NARROWEST, WIDEST),
        metavar="PX",
        help="Width of the picture in px: lanes are laid out anew, graphs are scaled. Default: as wide as it needs.",
    )(command)


def format_of(
    wanted: str | None, output: Path | None, able: Sequence[str] = FORMS_OF_CHARTS, what: str = "a chart"
) -> str:
    """The format of ``what``: the one asked for, else that of the output's suffix, else SVG.

    able: the formats that ``what`` can have. Wrong usage: a suffix that names no format, or another one than
    --format; a format that ``what`` cannot have.
    """
    suffix = output.suffix.lower() if output else ""
    named = SUFFIXES.get(suffix)
    if suffix and not named and not wanted:
        raise click.UsageError(f"-o {output}: {suffix} is no format of a drawing; {_can_be(what, able)}")
    if wanted and named and wanted != named:
        raise click.UsageError(f"-o {output} is a name for {named}, but --format says {wanted}: change one of them")
    form = wanted or named or SVG
    if form not in able:
        raise click.UsageError(f"{what} cannot be {form}: {_can_be(what, able)}")
    return form


def _can_be(what: str, able: Sequence[str]) -> str:
    suffixes = ", ".join(suffix for suffix, form in SUFFIXES.items() if form in able)
    return f"{what} is written as {', '.join(able)} (--format), by the suffixes {suffixes}"


def check_width(width: int | None, form: str) -> None:
    """Wrong usage: --width for what is no picture."""
    if width is not None and form not in PICTURES:
        raise click.UsageError(f"--width is the width of a picture ({', '.join(PICTURES)}), not of {form}")


def check_converter(form: str) -> None:
    """Wrong usage: PNG or PDF without CairoSVG, or without the library that it calls."""
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
    """What is written, and what it leaves out, in words; empty where it shows everything."""

    content: str | bytes
    note: str = ""


def in_form(svg: str, form: str) -> str | bytes:
    """An SVG in one of `PICTURES`."""
    if form == SVG:
        return svg
    from schedc.draw.raster import converted

    return converted(svg, form)


def write_drawing(drawing: Drawing, output: Path | None) -> None:
    """Writes it to a file, else to stdout; what it leaves out goes to stderr."""
    write(drawing.content, output)
    if drawing.note:
        click.echo(f"note: {drawing.note}", err=True)
