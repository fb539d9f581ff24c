"""`schedc export` and `schedc import`: write and read schedules in the formats of other tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import (
    EPILOG,
    asked,
    output_argument,
    replicas_argument,
    schedule_arguments,
    write,
)
from schedc.cli.cost_words import cost_arguments
from schedc.cli.given import ScheduleArgument
from schedc.cli.pictures import DOT, SUFFIXES
from schedc.cli.recorded import record_argument
from schedc.cli.screen import write_note
from schedc.interchange.targets import TARGETS

if TYPE_CHECKING:
    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given
    from schedc.plan.layout.parts import Layout
    from schedc.step.costs.costs import Costs
    from schedc.syntax.input import Input


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@record_argument
@click.option(
    "--to",
    "target",
    type=click.Choice(list(TARGETS)),
    required=True,
    help="; ".join(f"{name}: {row.purpose}" for name, row in TARGETS.items()) + ".",
)
@click.option("--layout", help="With --to megatron: the layers of each stage, as 'Et*3|(tt|)*29,m|L'.")
@replicas_argument
@output_argument
def export_command(
    schedule: Given,
    sizes: dict[str, int],
    costs: Costs,
    target: str,
    layout: str | None,
    replicas: int | None,
    output: Path | None,
) -> None:
    """Write SCHEDULE in another format. A target refuses what it cannot express, and names the nearest alternative."""
    from schedc.compiler import price
    from schedc.inputs import open_input
    from schedc.interchange.refusals import no_segments, no_works
    from schedc.plan.layout.parser import parse_layout

    if layout and target != "megatron":
        raise click.UsageError("--layout needs --to megatron")
    if replicas and target != "trace":
        raise click.UsageError(
            "--replicas needs --to trace; `schedc compile --replicas` writes a program with the works of replicas"
        )
    if target == "dot" and output and SUFFIXES.get(output.suffix.lower(), DOT) != DOT:
        raise click.UsageError(
            f"--to dot writes the graph's source; for {output} use `schedc show SCHEDULE --graph -o`"
        )
    chosen, tree = TARGETS[target], open_input(schedule)
    step = price(tree, sizes, costs, replicas)
    order, costs = step.schedule, step.costs
    if chosen.trains:
        no_segments(tree.parameters, order, target)
    if not chosen.works and not chosen.without_works:
        no_works(step.works, target, order.source)
    if layout:
        with asked():
            parse_layout(layout)
        order = replace(order, layout=layout)
    if chosen.note and order.placement.pipes > 1:
        write_note(f"note: {chosen.note}")
    if chosen.without_works and step.works is not None and len(step.works):
        write_note(f"note: {chosen.without_works}")
    write(chosen.write(order, costs, step.works, _layout_of(tree, order)), output)


def _layout_of(tree: Input, order: Schedule) -> Layout | None:
    """The layout of a plan, which knows dense from MoE layers."""
    from schedc.plan.apply import layout_of_plan
    from schedc.syntax.input import AppliedPlan

    return layout_of_plan(tree.tree, order) if isinstance(tree, AppliedPlan) and order.layout else None


@click.command("import", epilog=EPILOG)
@click.argument("file", type=ScheduleArgument())
@output_argument
def import_command(file: Given, output: Path | None) -> None:
    """Read a schedule CSV of torch, and write it as text.

    FILE is of either level. It is checked first.

    Every command takes the result, and the CSV itself, in place of SCHEDULE.
    """
    from schedc.inputs import is_order, open_order, without_places
    from schedc.ir.text import print_schedule
    from schedc.load.library import Text

    if not is_order(file):
        named = file.source.name if isinstance(file, Text) else file
        raise click.UsageError(f"{named} is neither a .csv file nor a schedule in the text form")
    write(print_schedule(without_places(open_order(file).schedule)), output)
