"""`schedc providers`: lists who can do each part of a step."""

from __future__ import annotations

import sys

import click

from schedc.cli.common import EPILOG, need_runtime
from schedc.cli.processes import run_to_end
from schedc.cli.spellings import renamed


@click.command(epilog=EPILOG)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    default="bfloat16",
    show_default=True,
    help="Type of the rows for which each is asked.",
)
@renamed("--columns", "--width", type=click.IntRange(1), default=1024, show_default=True, help="Columns of these rows.")
def providers_command(dtype: str, columns: int) -> None:
    """List who can do each part of a step on this machine.

    Needs schedc[runtime].

    Each line has the kind, the name, the package, and whether it serves or why it is refused.
    Pipeline(providers={KIND: NAME}) names one. Packages add theirs by entry points, which this command loads.
    """
    need_runtime("asking providers")
    command = [sys.executable, "-m", "schedc_runtime.commands.providers", "--dtype", dtype, "--width", str(columns)]
    sys.exit(run_to_end(command))
