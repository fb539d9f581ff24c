"""`schedc run`: trains a small model with a schedule, in processes of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, need_runtime, schedule_arguments, slices_argument
from schedc.cli.cost_words import cost_arguments, note_policy
from schedc.cli.processes import handed_over, run_to_end

if TYPE_CHECKING:
    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs


@click.command(epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@schedule_arguments
@slices_argument
@cost_arguments
@click.argument("runtime_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--check",
    "parity",
    type=click.Choice(["bitwise", "none"]),
    default="none",
    show_default=True,
    help="Compare loss and gradients with the serial reference.",
)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Training steps.")
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a Chrome trace (opens in Perfetto)."
)
@click.option("--trace-steps", type=click.IntRange(1), default=1, show_default=True, help="Trace the last N steps.")
def run_command(
    schedule: Given,
    sizes: dict[str, int],
    costs: Costs,
    runtime_options: tuple[str, ...],
    parity: str,
    steps: int,
    trace: Path | None,
    trace_steps: int,
) -> None:
    """Train a small model with SCHEDULE on local processes.

    Needs schedc[runtime].

    One process per rank. For a plan with experts, the model has these experts, and each rank has as many processes as
    the topology of the plan says. The table [cell] of a cost file decides the order inside overlapped pairs. Further
    options go to the runtime: --topology 1x2, --blocks, --width, --tokens, --rows, --in-process.
    """
    from schedc.compiler import compile_at
    from schedc.inputs import open_input
    from schedc.ir.save import form_of
    from schedc.step.costs.costs import dump_costs

    need_runtime("running")
    program = compile_at(schedule, sizes, costs)
    command = [sys.executable, "-m", "schedc_runtime.commands.run", "--steps", str(steps), *dense_layers_of(schedule)]
    command += ["--check", parity] if parity != "none" else []
    command += ["--trace", str(trace), "--trace-steps", str(trace_steps)] if trace else []
    contents = {"--program": form_of(program).content(program)}
    if costs.cell is not None:
        contents["--cost-file"] = dump_costs(costs).encode()
    with handed_over(contents) as files:
        status = run_to_end([*command, *files.options, *runtime_options], files.descriptors)
    if trace:
        note_policy(open_input(schedule), sizes, str(trace.with_suffix(".costs.toml")))
    sys.exit(status)


def dense_layers_of(name: Given) -> list[str]:
    """The runtime's option for the number of dense layers in a plan's model, which a program's layout does not say."""
    from schedc.inputs import open_input
    from schedc.plan.apply import dense_of
    from schedc.syntax.input import AppliedPlan

    tree = open_input(name)
    dense = dense_of(tree.tree) if isinstance(tree, AppliedPlan) else None
    return [] if dense is None else ["--dense", str(dense)]
