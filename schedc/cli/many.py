"""Many files at once: which ones a command means, and all findings in them at the default sizes of their schedules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from schedc.cli.common import finish, json_argument, read_sizes
from schedc.cli.given import ScheduleArgument
from schedc.cli.screen import write_note

if TYPE_CHECKING:
    from schedc.diagnostics import Diagnostic
    from schedc.source import Source

FOREIGN = ("sarif", "github")
"""Formats of other tools."""
FORMS = ("text", "json", *FOREIGN)
"""How findings are printed."""
F = TypeVar("F", bound=Callable[..., Any])


def files_arguments(command: F) -> F:
    """Adds SCHEDULE... and --format. The command gets ``schedule`` and ``form``; several files are checked here."""

    @wraps(command)
    @click.pass_context
    def one_or_many(
        ctx: click.Context,
        /,
        *,
        schedules: tuple[Any, ...],
        wanted: str | None,
        as_json: bool,
        mend: bool,
        places: tuple[Mapping[str, int], ...],
        **rest: Any,
    ) -> Any:
        if as_json and wanted not in (None, "json"):
            raise click.UsageError(f"--json, and --format {wanted}: ask for one of them")
        form = "json" if as_json else wanted or "text"
        known = _mend(schedules) if mend else {}
        if len(schedules) == 1 and not places and not _is_folder(schedules[0]):
            with _told(form):
                return command(schedule=schedules[0], form=form, **rest)
        given = {name for name in rest if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        if alone := [each.opts[-1] for each in ctx.command.params if each.name in given]:
            several = "several are checked at their default sizes, or at those of --sizes"
            raise click.UsageError(f"{', '.join(alone)}: give one schedule, without --sizes; {several}")
        return check_files(map(str, schedules), form, known, places)

    formats = click.option(
        "--format",
        "wanted",
        type=click.Choice(FORMS),
        help="How findings are printed. sarif: for code scanning. github: annotations of a workflow.",
    )(json_argument(one_or_many))
    formats = click.option(
        "--sizes", "places", multiple=True, metavar="NAME=INTEGER,...", callback=_places,
        help="Check the schedules of files at these sizes, such as P=8,M=32; once for each --sizes.",
    )(formats)  # fmt: skip
    formats = click.option("--fix", "mend", is_flag=True, help="First apply the edits that mean nothing else.")(formats)
    return click.argument("schedules", nargs=-1, required=True, metavar="SCHEDULE...", type=ScheduleArgument())(formats)  # type: ignore[return-value]


def _places(_ctx: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[Mapping[str, int], ...]:
    return tuple(read_sizes(value.split(","), "--sizes P=8,M=32") for value in values)


def _is_folder(given: Any) -> bool:
    """Whether an argument alone means the files of a folder. A name of the library means its schedule, as elsewhere."""
    from schedc.load.library import names

    return isinstance(given, str) and Path(given).is_dir() and given not in names()


def _mend(given: Iterable[Any]) -> dict[Path, list[Diagnostic]]:
    """Write the safe edits into the files. Say on stderr which ones, and which edits are left to a person.

    Returns the findings that are left, by file, for files that can be read.
    """
    from schedc.diagnostics import DiagnosticError
    from schedc.editor.findings import findings
    from schedc.fixes import fix_of, mended

    paths = [Path(each) for each in given if isinstance(each, str)]
    if strangers := [str(each) for each in given if not isinstance(each, str) or not Path(each).exists()]:
        raise click.UsageError(f"--fix writes into files: {', '.join(strangers)} is none")
    known = {}
    for path in schedule_files(paths):
        try:
            text, done, known[path] = mended(own_text(path), findings)
        except DiagnosticError:
            continue  # the check reports files that cannot be read
        if done:
            path.write_text(text.text, encoding="utf-8", newline="\n")
        for each in done:
            click.echo(f"fixed {path}:{each.primary.span}: {each.code} {each.message}", err=True)
        for each in known[path]:
            if (fix := fix_of(each)) is not None and not fix.safe:
                left = f"left {path}:{each.primary.span}: {each.code} {each.message}"
                click.echo(f"{left} (an edit that may mean something else: {fix.title})", err=True)
    return known


@contextmanager
def _told(form: str) -> Iterator[None]:
    """A block whose findings are printed in the format of another tool too, where it is asked for."""
    from schedc.diagnostics import DiagnosticError

    try:
        yield
    except DiagnosticError as error:
        if form in FOREIGN:
            print_foreign(error.diagnostics, form)
        raise


def files_of(given: Iterable[str]) -> list[str]:
    """Schedules as they are given, and the files of each folder in place of the folder."""
    return [own for each in given for own in (map(str, schedule_files([Path(each)])) if _is_folder(each) else [each])]


def schedule_files(paths: Iterable[Path]) -> list[Path]:
    """The files of the paths, those of folders included, each once."""
    files: dict[Path, None] = {}
    for path in paths:
        files |= dict.fromkeys(sorted(path.rglob("*.sched")) if path.is_dir() else [path])
    return list(files)


def own_text(path: Path) -> Source:
    """The text of a file, though it has the name of a schedule of the library; raises as `schedc.load.library.load`."""
    from schedc.load.library import load
    from schedc.source import Source

    return Source(str(path), load(path.absolute()).text)


def check_files(
    given: Iterable[str], form: str, known: Mapping[Path, list[Diagnostic]], places: Sequence[Mapping[str, int]] = ()
) -> None:
    """Check every schedule and plan of the files and folders, and print the findings.

    known: findings at the default sizes, by file, that were looked for already. places: sizes for schedules, in place
    of their defaults; plans have their own.
    """
    from schedc.fixes import finding_json

    paths = [Path(each) for each in given]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise click.UsageError(f"there is no file or folder {', '.join(missing)}; library names are checked one by one")
    files = schedule_files(paths)
    if not files:
        raise click.UsageError(f"there is no .sched file in {', '.join(map(str, paths))}")
    if places and (own := [str(path) for path in files if _has_plans(path)]):
        write_note(f"note: plans have sizes of their own, not those of --sizes: {', '.join(own)}")
    done = {} if places else known
    found = {str(path): done[path] if path in done else _findings(path, places or ({},)) for path in files}
    findings = tuple(finding for each in found.values() for finding in each)
    if form in FOREIGN:
        print_foreign(findings, form)
    elif form == "json":
        each = [{"file": name, "diagnostics": [finding_json(one) for one in own]} for name, own in found.items()]
        click.echo(json.dumps({"schema": "schedc.check.files", "version": 1, "files": each}))
    else:
        faulty = sum(map(bool, found.values()))
        click.echo(f"{len(files)} file{'s' * (len(files) != 1)}, {faulty} with findings")
    finish(findings)


def print_foreign(findings: tuple[Diagnostic, ...], form: str) -> None:
    """Print findings in the format of another tool."""
    from schedc.report.findings import to_github, to_sarif

    lines = [to_sarif(findings)] if form == "sarif" else list(to_github(findings))
    if lines:
        click.echo("\n".join(lines))


def _has_plans(path: Path) -> bool:
    """Whether a file that can be read has a plan."""
    from schedc.diagnostics import DiagnosticError
    from schedc.syntax.parser import parse

    try:
        return bool(parse(own_text(path)).plans)
    except DiagnosticError:
        return False


def _findings(path: Path, places: Sequence[Mapping[str, int]]) -> list[Diagnostic]:
    """The findings in a file, each once. places: at which sizes."""
    from schedc.diagnostics import DiagnosticError
    from schedc.editor.findings import findings

    try:
        source = own_text(path)
    except DiagnosticError as error:
        return list(error.diagnostics)

    def at(sizes: Mapping[str, int]) -> list[Diagnostic]:
        return findings(source, lambda _: dict(sizes))

    found: list[Diagnostic] = []
    for sizes in places:
        found += [each for each in at(sizes) if each not in found]
    return found
