"""`schedc diff`: compares two schedules at the same sizes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, FINDINGS, json_argument, schedule_arguments
from schedc.cli.cost_words import cost_arguments
from schedc.cli.given import ScheduleArgument

if TYPE_CHECKING:
    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs


@click.command(epilog=EPILOG)
@schedule_arguments
@click.argument("other", type=ScheduleArgument())
@cost_arguments
@json_argument
def diff_command(schedule: Given, other: Given, sizes: dict[str, int], costs: Costs, as_json: bool) -> None:
    """Say where the orders of two schedules part.

    Prints order of ops, makespan, bubble, memory and messages of SCHEDULE and OTHER.

    -D sets a size in each schedule that has it. Exit code 0 if both run the same ops in the same order, else 1.
    """
    from schedc.report.difference import to_json, to_text
    from schedc.step.difference import compare

    (first, first_costs), (second, second_costs) = _priced((schedule, other), sizes, costs)
    difference = compare(first, second, first_costs, second_costs)
    click.echo(json.dumps(to_json(difference)) if as_json else "\n".join(to_text(difference)))
    if not difference.equal:
        sys.exit(FINDINGS)


def _priced(names: tuple[Given, Given], sizes: dict[str, int], costs: Costs) -> list[tuple[Schedule, Costs]]:
    """Both schedules, each with the costs of its stages."""
    from schedc.compiler import price
    from schedc.diagnostics import Diagnostic, RequestError, did_you_mean
    from schedc.inputs import open_input

    trees = [open_input(name) for name in names]
    parameters = [{parameter.name for parameter in tree.parameters} for tree in trees]
    if unknown := sorted(set(sizes) - set().union(*parameters)):
        help = did_you_mean(unknown[0], set().union(*parameters))
        raise RequestError([Diagnostic("S111", f"neither schedule has a size `{unknown[0]}`", help=help)])
    steps = [
        price(tree, {size: value for size, value in sizes.items() if size in own}, costs)
        for tree, own in zip(trees, parameters, strict=True)
    ]
    return [(step.schedule, step.costs) for step in steps]
