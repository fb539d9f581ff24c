"""`schedc doctor`: whether the processes of a job fit together."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from schedc.cli.common import EPILOG, json_argument, need_runtime
from schedc.cli.processes import run_to_end


@click.command(epilog=EPILOG)
@click.argument("program", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_argument
def doctor_command(program: Path | None, as_json: bool) -> None:
    """Tell whether the processes of a job fit together.

    Needs schedc[runtime]. PROGRAM is a file that `schedc compile` wrote.

    Prints a line for each question: versions, device, program, mesh. Under torchrun (`torchrun --nproc-per-node 4 -m
    schedc doctor PROGRAM`) all ranks compare these. Two more lines have the order of ranks on nodes, and the speed of
    the links between neighbours, each measured alone. Exit status 1 if something is wrong.
    """
    need_runtime("the doctor")
    command = [sys.executable, "-m", "schedc_runtime.commands.doctor", *(["--json"] if as_json else [])]
    sys.exit(run_to_end([*command, *([str(program)] if program else [])]))
