"""`schedc fmt`: formats .sched files."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import click

from schedc.cli.common import EPILOG, FINDINGS, print_findings
from schedc.cli.many import own_text, schedule_files
from schedc.cli.screen import write_note
from schedc.cli.spellings import renamed


@click.command(epilog=EPILOG)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path, allow_dash=True))
@renamed("--diff", "--check", is_flag=True, help="Write nothing; show the changes, and exit with 1 if there are any.")
def fmt_command(files: tuple[Path, ...], diff: bool) -> None:
    """Format .sched FILES in place.

    Their tokens and comments stay: only white space changes.

    A folder means the .sched files below it. - means standard input, whose result goes to standard output.
    """
    from schedc.diagnostics import Diagnostic, DiagnosticError

    changed = 0
    findings: list[Diagnostic] = []
    for path in schedule_files(files):
        try:
            changed += _format(path, diff)
        except DiagnosticError as error:
            findings += error.diagnostics
    if diff and changed:
        click.echo(f"{changed} file{'s' if changed > 1 else ''} would be formatted", err=True)
    if findings:
        print_findings(tuple(findings))
    if findings or (diff and changed):
        sys.exit(FINDINGS)


def _format(path: Path, diff: bool) -> bool:
    """Formats one file, or shows the change with ``diff``. Returns whether the text changes."""
    from schedc.source import Source
    from schedc.syntax.formatter import format_source

    standard = str(path) == "-"
    source = Source("<stdin>", sys.stdin.read()) if standard else own_text(path)
    text = format_source(source)
    changed = text.encode() != source.text.encode()
    if diff:
        if changed:
            lines = difflib.unified_diff(
                source.text.splitlines(), text.splitlines(), source.name, f"{source.name} (formatted)", lineterm=""
            )
            click.echo("\n".join(lines))
    elif standard:
        click.echo(text, nl=False)
    elif changed:
        path.write_text(text, encoding="utf-8", newline="\n")
        write_note(f"formatted {path}")
    return changed
