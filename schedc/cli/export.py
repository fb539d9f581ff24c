"""`schedc export` and `schedc import`: schedules in the formats of other tools, out and in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, asked, cost_arguments, output_argument, schedule_arguments, write
from schedc.cli.given import ScheduleArgument
from schedc.cli.pictures import DOT, SUFFIXES

if TYPE_CHECKING:
    from schedc.cost.costs import Costs
    from schedc.inputs import Input
    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given


@dataclass(frozen=True)
class Export:
    """What a target is for, and how it is written. ``trains``: another trainer is to run it."""

    purpose: str
    emit: Callable[[Schedule, Costs], str]
    trains: bool = False


def _csv(schedule: Schedule, _costs: Costs) -> str:
    from schedc.interchange.torch_csv import to_torch_csv

    if schedule.placement.pipes > 1:
        click.echo("note: torch itself loads no schedule with two directions (`schedc explain S603`)", err=True)
    return to_torch_csv(schedule)


def _lowered(schedule: Schedule, costs: Costs) -> str:
    from schedc.interchange.refusals import one_copy
    from schedc.interchange.torch_lowered import to_lowered_csv
    from schedc.passes.insert_communication import insert_communication

    one_copy(schedule.placement, "torch's lowered CSV", schedule.source)
    return to_lowered_csv(insert_communication(schedule, costs))


def _torchtitan(schedule: Schedule, _costs: Costs) -> str:
    from schedc.interchange.csv_trainers import to_torchtitan

    return to_torchtitan(schedule)


def _nemo_automodel(schedule: Schedule, _costs: Costs) -> str:
    from schedc.interchange.csv_trainers import to_nemo_automodel

    return to_nemo_automodel(schedule)


def _megatron(schedule: Schedule, _costs: Costs, layout: str | None = None) -> str:
    from schedc.interchange.megatron import to_megatron
    from schedc.layout.parser import parse_layout

    with asked():  # that of a plan was read before
        placed = parse_layout(layout or schedule.layout) if layout or schedule.layout else None
    return to_megatron(schedule, placed)


def _trace(schedule: Schedule, costs: Costs) -> str:
    from schedc.analysis.dependencies import Dependencies
    from schedc.analysis.memory import measure_memory
    from schedc.analysis.timeline import simulate
    from schedc.interchange.trace import to_trace

    known = Dependencies.of(schedule)
    return to_trace(schedule, simulate(schedule, costs, known), measure_memory(schedule, costs, known))


def _dot(schedule: Schedule, costs: Costs) -> str:
    from schedc.analysis.timeline import simulate
    from schedc.interchange.dot import schedule_graph

    return str(schedule_graph(schedule, simulate(schedule, costs)).source)


def _text(schedule: Schedule, _costs: Costs) -> str:
    from schedc.ir.text import print_schedule

    return print_schedule(schedule)


def _program(schedule: Schedule, costs: Costs) -> str:
    from schedc.ir.text import print_program
    from schedc.passes.insert_communication import insert_communication

    return print_program(insert_communication(schedule, costs))


def _json(schedule: Schedule, costs: Costs) -> str:
    from schedc.ir.json import program_to_json
    from schedc.passes.insert_communication import insert_communication

    return program_to_json(insert_communication(schedule, costs))


EXPORTS: Mapping[str, Export] = {
    "csv": Export("torch's schedule CSV, one line of ops per rank", _csv),
    "csv-lowered": Export("the same with messages, gathers and reductions", _lowered, trains=True),
    "torchtitan": Export("torchtitan's flags that go with the CSV", _torchtitan, trains=True),
    "nemo": Export("the lines of a NeMo AutoModel recipe that go with the CSV", _nemo_automodel, trains=True),
    "megatron": Export("Megatron's flags", _megatron, trains=True),
    "trace": Export("the predicted timeline for Perfetto and chrome://tracing", _trace),
    "dot": Export("the dependency graph of a small schedule for graphviz, critical path marked", _dot),
    "text": Export("the schedule, to read and to edit", _text),
    "program": Export("the instruction streams, to read", _program),
    "json": Export("the program that the runtime loads", _json),
}


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@click.option(
    "--to",
    "target",
    type=click.Choice(list(EXPORTS)),
    required=True,
    help="; ".join(f"{name}: {export.purpose}" for name, export in EXPORTS.items()) + ".",
)
@click.option("--layout", help="With --to megatron: which stage holds which layers, as 'Et*3|(tt|)*29,m|L'.")
@output_argument
def export(
    schedule: Given, sizes: dict[str, int], costs: Costs, target: str, layout: str | None, output: Path | None
) -> None:
    """Write SCHEDULE in another format. What the target cannot express is refused, with the nearest that it can."""
    from schedc.compiler import priced
    from schedc.inputs import open_input

    if layout and target != "megatron":
        raise click.UsageError("--layout needs --to megatron")
    if target == "dot" and output and SUFFIXES.get(output.suffix.lower(), DOT) != DOT:
        raise click.UsageError(
            f"--to dot writes the graph's source; for {output} use `schedc show SCHEDULE --graph -o`"
        )
    chosen = EXPORTS[target]
    given = open_input(schedule)
    order, costs = priced(given, sizes, costs)
    if chosen.trains:
        _refuse_segments(given, order, target)
    write(_megatron(order, costs, layout) if layout else chosen.emit(order, costs), output)


def _refuse_segments(given: Input, order: Schedule, target: str) -> None:
    """Other trainers would take segments of one sequence for microbatches that know nothing of each other."""
    from schedc.interchange.refusals import cannot

    if not any(p.role == "segments" and order.sizes.get(p.name, 1) > 1 for p in given.parameters):
        return
    why = "the attention of a segment reads what the segments before it left: there each microbatch stands alone"
    raise cannot("S607", f"{target} has no segments of a sequence", why, "`1f1b` is the nearest", order.source)


@click.command("import", epilog=EPILOG)
@click.argument("file", type=ScheduleArgument())
@output_argument
def import_command(file: Given, output: Path | None) -> None:
    """Check FILE, a schedule CSV of torch (either level), and write it in the text form.

    The result, and the CSV too, can stand wherever a command takes SCHEDULE.
    """
    from schedc.inputs import is_order, open_order, without_places
    from schedc.ir.text import print_schedule
    from schedc.load.library import Text

    if not is_order(file):
        named = file.source.name if isinstance(file, Text) else file
        raise click.UsageError(f"{named} is neither a .csv file nor a schedule in the text form")
    write(print_schedule(without_places(open_order(file).schedule)), output)
