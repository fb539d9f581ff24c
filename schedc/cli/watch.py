"""`schedc watch`: draws a schedule anew whenever its file is saved."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.charts import drawing
from schedc.cli.common import EPILOG, output_argument, print_findings, schedule_arguments
from schedc.cli.cost_words import cost_arguments
from schedc.cli.pictures import TERM, check_converter, check_width, format_of, width_option
from schedc.cli.screen import coloured, colours_of, width_of

if TYPE_CHECKING:
    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs

_INTERVAL = 0.2
"""Seconds between two looks at the file."""

_CLEAR = "\x1b[2J\x1b[3J\x1b[H"

State = tuple[int, int, int] | None
"""The time, size and inode of a file, which a save changes; None for a file that does not exist."""


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@width_option
@output_argument
def watch_command(schedule: Given, sizes: dict[str, int], costs: Costs, width: int | None, output: Path | None) -> None:
    """Draw the file SCHEDULE again on every save.

    It draws in the terminal, until Ctrl-C.

    With -o, also keep that picture, page or text (by its suffix) up to date. While SCHEDULE is broken, its findings are
    shown, and -o keeps the last good drawing.
    """
    if not isinstance(schedule, str):
        raise click.UsageError("`watch` follows a file, and a pipe is none; `show` draws what comes through one")
    file, colon, _name = schedule.rpartition(":")
    path = Path(file if colon and file.endswith(".sched") else schedule)
    if not path.is_file():
        raise click.UsageError(f"{path} is not a file; `watch` follows a file of yours, `show` draws the library")
    if output is None and width is not None:
        raise click.UsageError("--width needs -o FILE")
    if output is not None:
        form = format_of(None, output)
        check_width(width, form)
        check_converter(form)
    for _ in _changes(path):
        _redraw(schedule, sizes, costs, width, output)


def _changes(path: Path) -> Iterator[None]:
    """Yields at once, and then after every save of the file and every change of the terminal's width."""
    previous: tuple[State, int] | None = None
    while True:
        current = (_state(path), width_of(None))
        if current != previous:
            previous = current
            yield
        time.sleep(_INTERVAL)


def _state(path: Path) -> State:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _redraw(schedule: str, sizes: Mapping[str, int], costs: Costs, width: int | None, output: Path | None) -> None:
    """Draws the file and prints the claims that fail, or prints the findings that prevent a drawing."""
    from schedc.compiler import analyse
    from schedc.diagnostics import DiagnosticError
    from schedc.drawing.chart import Chart

    if sys.stdout.isatty():
        click.echo(_CLEAR, nl=False)
    try:
        analysis = analyse(schedule, sizes, costs)
    except DiagnosticError as error:
        print_findings(error.diagnostics)
        return
    charts = [Chart.of(analysis.schedule, analysis.timeline, analysis.memory, costs, analysis.works)]
    shown = drawing(charts, TERM, columns=width_of(None), colours=colours_of(None)).content
    click.echo(shown, color=coloured(sys.stdout) or None)
    if output is not None:
        form, columns = format_of(None, output), width_of(output)
        try:
            drawn = drawing(charts, form, columns=columns, colours=colours_of(output), width=width)
            _replace(output, drawn.content)
            click.echo(f"wrote {output}")
        except DiagnosticError as error:  # too many pixels: the next save may have fewer
            print_findings(error.diagnostics)
    if analysis.diagnostics:
        print_findings(analysis.diagnostics)


def _replace(path: Path, content: str | bytes) -> None:
    """Writes a file in one step: a reader sees the old drawing or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content if isinstance(content, bytes) else content.encode())
    part.replace(path)
