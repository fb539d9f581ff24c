"""`schedc partition`: how a model is cut into stages, and what crosses between them, without weights."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from schedc.cli.common import EPILOG, need_runtime, sizes_argument
from schedc.cli.processes import run_to_end


@click.command(epilog=EPILOG)
@click.argument("model", metavar="MODULE:FUNCTION")
@sizes_argument
@click.option("--example", multiple=True, metavar="[NAME=]DTYPE[SIZES]", help="A tensor of a microbatch; repeat it.")
@click.option("--split-point", multiple=True, metavar="SUBMODULE", help="Begins a stage; repeat it.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the graph (graphviz).")
def partition_command(
    model: str, sizes: dict[str, int], example: tuple[str, ...], split_point: tuple[str, ...], output: Path | None
) -> None:
    """Print the stages of a model, and what crosses between them.

    MODULE:FUNCTION makes the model. Needs schedc[runtime].

    -D P=4 gives the number of stages; -D v=2 multiplies it. The function is called on the meta device, so that no
    weights are made: --example 'input_ids=int64[2, 16]' gives the shapes that the model is recorded with.
    """
    need_runtime("cutting a model")
    if unknown := sorted(set(sizes) - {"P", "v"}):
        raise click.UsageError(f"-D {unknown[0]}: stages follow from P and v")
    stages = sizes.get("P", 2) * sizes.get("v", 1)
    command = [sys.executable, "-m", "schedc_runtime.commands.partition", model, "--stages", str(stages)]
    command += [text for name in example for text in ("--example", name)]
    command += [text for name in split_point for text in ("--split-point", name)]
    command += ["-o", str(output)] if output is not None else []
    sys.exit(run_to_end(command))
