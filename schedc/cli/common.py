"""The parts that commands share: options for sizes and costs, output of results, and printing of findings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from schedc.cli.completion import complete_size
from schedc.cli.failures import print_failed
from schedc.cli.given import ScheduleArgument
from schedc.cli.screen import coloured, is_quiet, painter, write_note

if TYPE_CHECKING:
    from schedc.diagnostics import Diagnostic
    from schedc.load.library import Given

FINDINGS, USAGE, INTERNAL, INTERRUPTED = 1, 2, 4, 130

WIDEST = 100
"""Characters in a line of help and of lists."""

EPILOG = (
    "Exit status: 0 done; 1 findings in the schedule or another file that was read; 2 wrong usage: an option, a name, "
    "a size, a cost or a range that does not exist; 4 a fault of schedc itself; 130 interrupted (Ctrl-C)."
)

F = TypeVar("F", bound=Callable[..., Any])


def _sizes(_ctx: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    return read_sizes(values, "-D P=8")


def read_sizes(values: Iterable[str], example: str) -> dict[str, int]:
    """Sizes by name. Raises `click.BadParameter`, with an example, for a text that is not NAME=INTEGER."""
    sizes: dict[str, int] = {}
    for value in values:
        name, equals, number = value.strip().partition("=")
        if not equals or not name.isidentifier() or not number.lstrip("-").isdecimal() or len(number) > 18:
            raise click.BadParameter(f"{value!r} is not NAME=INTEGER (for example {example})")
        sizes[name] = int(number)
    return sizes


def sizes_argument(command: F) -> F:
    """Adds -D NAME=INTEGER, which the command gets as ``sizes``."""
    return click.option(
        "-D",
        "--define",
        "sizes",
        multiple=True,
        metavar="NAME=INTEGER",
        callback=_sizes,
        shell_complete=complete_size,
        help="Value of a size parameter; the others take the defaults of the file.",
    )(command)


def schedule_arguments(command: F) -> F:
    """Adds SCHEDULE and -D, which the command gets as ``schedule`` and ``sizes``."""
    return click.argument("schedule", type=ScheduleArgument())(sizes_argument(command))


replicas_argument = click.option(
    "--replicas",
    type=click.IntRange(2),
    help="Price what so many replicas of each rank do together: sums of gradients, and gathers with `shard dense`. "
    "Needs a plan with parameters, and the cost dp.",
)
"""Adds --replicas; the command gets ``replicas``, None without it."""


def slices_argument(command: F) -> F:
    """Adds --slices, which puts a `schedc.load.library.InSlices` in place of the command's ``schedule``."""

    @wraps(command)
    def in_slices(*, schedule: Given, slices: int | None, **rest: Any) -> Any:
        if slices is None:
            return command(schedule=schedule, **rest)
        from schedc.load.library import InSlices, named

        return command(schedule=InSlices(named(schedule), slices), **rest)

    return click.option(
        "--slices",
        type=click.IntRange(1),
        help="Run a microbatch as so many slices of its rows in each cell; overrides the lines `slices` of a plan.",
    )(in_slices)  # type: ignore[return-value]


def json_argument(command: F) -> F:
    """Adds --json, which the command gets as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")(command)


class PageFile(click.Path):
    """The path of a page that is written: its suffix is .html or .htm."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if Path(str(path)).suffix.lower() not in (".html", ".htm"):
            self.fail(f"{value}: the output is a page, FILE.html", param, ctx)
        return path


def page_argument(command: F) -> F:
    """Adds -o FILE for a page, which the command gets as ``output``."""
    return click.option("-o", "--output", type=PageFile(), metavar="FILE.html", help="File for a page.")(command)


def output_argument(command: F) -> F:
    """Adds -o FILE, which the command gets as ``output``."""
    return click.option(
        "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; default stdout."
    )(command)


@contextmanager
def asked() -> Iterator[None]:
    """A block that reads the command line alone: findings inside it are wrong usage."""
    from schedc.diagnostics import DiagnosticError, RequestError

    try:
        yield
    except DiagnosticError as error:
        raise RequestError(error.diagnostics) from None


def write(content: str | bytes, path: Path | None) -> None:
    """Writes text, or the bytes of a picture, to a file or else to stdout. Bytes to a terminal are wrong usage."""
    if path is None:
        if isinstance(content, bytes) and sys.stdout.isatty():
            raise click.UsageError("a picture in this format is no text for a terminal: give -o FILE, or pipe it")
        click.echo(
            content, nl=isinstance(content, str) and not content.endswith("\n"), color=coloured(sys.stdout) or None
        )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    write_note(f"wrote {path}")


def print_findings(diagnostics: tuple[Diagnostic, ...]) -> None:
    """Prints findings on stderr, in colours where the terminal has them."""
    from schedc.diagnostics import render

    colours = coloured(sys.stderr)
    for diagnostic in diagnostics:
        click.echo(render(diagnostic, painter(colours)) + "\n", err=True, color=colours or None)
    count = len(diagnostics)
    click.echo(f"{count} finding{'s' if count != 1 else ''}; `schedc explain CODE` tells more", err=True)


def need(purpose: str, extra: str, *modules: str) -> None:
    """Raises `click.UsageError` where a module of an extra is missing. purpose: what needs it, as ``the fit needs``."""
    from importlib.util import find_spec

    if any(find_spec(name) is None for name in modules):
        raise click.UsageError(f"{purpose}: pip install 'schedc[{extra}]'")


def need_runtime(activity: str) -> None:
    """Raises `click.UsageError` where the runtime is missing."""
    need(f"{activity} needs the runtime", "runtime", "torch", "schedc_runtime")


def progress_bar(length: int, label: str) -> Any:
    """A bar on stderr, in terminals only."""
    return click.progressbar(length=length, label=label, file=sys.stderr, hidden=is_quiet() or not sys.stderr.isatty())


@contextmanager
def failures_told(schema: str, as_json: bool) -> Iterator[None]:
    """A block whose findings are printed on stdout too, where the command was asked for JSON."""
    from schedc.diagnostics import DiagnosticError
    from schedc.report.check import failed_json

    try:
        yield
    except DiagnosticError as error:
        if as_json:
            print_failed(failed_json(error.diagnostics, schema))
        raise


def note_plan(name: Given) -> None:
    """Say on stderr that a command for many sizes takes the schedule of a plan, if ``name`` is one of a plan."""
    from schedc.inputs import plan_at

    if text := plan_at(name):
        write_note(f"note: {text}")


def finish(diagnostics: tuple[Diagnostic, ...]) -> None:
    """Prints findings, if there are any, and ends with their exit status."""
    if diagnostics:
        print_findings(diagnostics)
        sys.exit(FINDINGS)
