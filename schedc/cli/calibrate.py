"""`schedc calibrate`: measures the stages, segments and exchanges of a model on this machine, as a cost file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, need_runtime, output_argument, schedule_arguments
from schedc.cli.processes import handed_over, run_to_end
from schedc.cli.run import dense_layers_of
from schedc.cli.spellings import renamed

if TYPE_CHECKING:
    from schedc.load.library import Given


@click.command(epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@schedule_arguments
@click.argument("runtime_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--model",
    metavar="MODULE:FUNCTION",
    help="Called without arguments on every process; returns (model, loss_fn, batch, targets) of one microbatch.",
)
@click.option("--toy", type=click.Choice(["gpt", "moe"]), help="Default: moe where the plan has experts, else gpt.")
@click.option(
    "--only",
    type=click.Choice(["experts", "exchange", "sums", "launch"]),
    help="Measure only these times, for a row of a fit.",
)
@click.option(
    "--lengths",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Packed rows to measure, lengths of documents on each line: the costs of rows of data.",
)
@renamed(
    "--processes",
    "--ranks",
    "ranks",
    type=click.IntRange(1),
    help="Processes that share the experts, or sum gradients; default: the plan's topology.",
)
@output_argument
def calibrate_command(
    schedule: Given,
    sizes: dict[str, int],
    runtime_options: tuple[str, ...],
    model: str | None,
    toy: str | None,
    only: str | None,
    lengths: Path | None,
    ranks: int | None,
    output: Path | None,
) -> None:
    """Measure the times of a model's parts on this machine.

    The model is cut into the stages of SCHEDULE, or of a plan. Needs schedc[runtime].

    The cost file has the times of every stage, and of its segments and exchanges where it has experts or the plan
    overlaps. `schedc check --cost-file` and `schedc run --cost-file` read it. With --lengths the file has the costs of
    packed rows, which `schedc_runtime.data.RowCosts.open` reads. Further options go to the runtime:
    --repetitions, --warmup, --slices 2 4, --topology 2x2; for the toy models --blocks, --width, --tokens, --rows.
    """
    from schedc.compiler import compile_at
    from schedc.ir.save import form_of

    need_runtime("measuring")
    if model and toy:
        raise click.UsageError("--model and --toy exclude each other")
    if only and lengths:
        raise click.UsageError("--only and --lengths exclude each other")
    program = compile_at(schedule, sizes)
    options = {
        "--model": model,
        "--toy": toy,
        "--only": only,
        "--lengths": lengths,
        "--topology": f"1x{ranks}" if ranks else None,
        "-o": output,
    }
    command = [sys.executable, "-m", "schedc_runtime.commands.calibrate", *dense_layers_of(schedule)]
    command += [str(part) for option, value in options.items() if value is not None for part in (option, value)]
    with handed_over({"--program": form_of(program).content(program)}) as files:
        sys.exit(run_to_end([*command, *files.options, *runtime_options], files.descriptors))
