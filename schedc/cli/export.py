"""`schedc export`: a schedule in another format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from schedc.cli.common import EPILOG, output_argument, schedule_arguments, write


def _export_csv(schedule: str, sizes: dict[str, int]) -> str:
    from schedc.compiler import legal_schedule
    from schedc.emit.torch_csv import to_torch_csv
    from schedc.library import open_schedule

    return to_torch_csv(legal_schedule(open_schedule(schedule), sizes))


def _export_text(schedule: str, sizes: dict[str, int]) -> str:
    from schedc.compiler import legal_schedule
    from schedc.ir.text import print_schedule
    from schedc.library import open_schedule

    return print_schedule(legal_schedule(open_schedule(schedule), sizes))


def _export_program(schedule: str, sizes: dict[str, int]) -> str:
    from schedc.compiler import compile_at
    from schedc.ir.text import print_program

    return print_program(compile_at(schedule, sizes))


def _export_json(schedule: str, sizes: dict[str, int]) -> str:
    from schedc.compiler import compile_at
    from schedc.ir.json import program_to_json

    return program_to_json(compile_at(schedule, sizes))


EXPORTS: dict[str, Callable[[str, dict[str, int]], str]] = {
    "csv": _export_csv,
    "text": _export_text,
    "program": _export_program,
    "json": _export_json,
}


@click.command(epilog=EPILOG)
@schedule_arguments
@click.option(
    "--to",
    "target",
    type=click.Choice(list(EXPORTS)),
    required=True,
    help="csv: torch's schedule CSV, one line per rank. text: the schedule. program: the instruction "
    "streams. json: the program that the runtime loads.",
)
@output_argument
def export(schedule: str, sizes: dict[str, int], target: str, output: Path | None) -> None:
    """Write SCHEDULE in another format."""
    write(EXPORTS[target](schedule, sizes), output)
