"""`schedc compare`: schedules side by side at one size, in the unit of a microbatch on a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, FINDINGS, json_argument, page_argument, sizes_argument, write
from schedc.cli.cost_words import SCALED, SPLIT, check_scaled, scaled_arguments
from schedc.cli.frontier import DEFAULT, MOST_RANKS, check_priced
from schedc.cli.given import ScheduleArgument
from schedc.cli.plan_request import above_zero

if TYPE_CHECKING:
    from schedc.load.library import Text
    from schedc.step.costs.costs import Costs

_MOST_DRAWN = 64
"""The largest P of a page. Above `MOST_RANKS` it has no floors, which would take minutes."""


@click.command(epilog=EPILOG)
@click.argument("schedules", nargs=-1, required=True, metavar="SCHEDULE...", type=ScheduleArgument())
@sizes_argument
@scaled_arguments(SCALED, "a comparison", cells=True)
@click.option(
    "--memory",
    metavar="MICROBATCHES",
    callback=above_zero("how many microbatches a rank can hold"),
    help="Microbatches that a rank can hold (memory in the unit of the cost `activation`, if that is set).",
)
@json_argument
@page_argument
def compare_command(
    schedules: tuple[str | Text, ...],
    sizes: dict[str, int],
    costs: Costs,
    memory: float | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Compare schedules at one size, and say what wins where.

    -D P and M are 8 and 32 by default. A row has step, bubble, memory, messages, and what the schedule needs.

    One microbatch on one rank takes F, I and W, by default 1 each, however many stages the rank has. With a table
    [cell] times are those from inside cells. Below the table stands which schedule is the shortest from which memory
    on, and at which latencies. -o writes a page with sliders.
    Exit code 1 if a schedule is not legal at these sizes; the others are compared.
    """
    from schedc.frontier.compared import compare_schedules
    from schedc.report.compared import to_json, to_text

    sizes = {**DEFAULT, **sizes}
    if output is not None:
        check_scaled(costs, SPLIT, "a page with sliders")
        if not all(isinstance(each, str) for each in schedules):
            raise click.UsageError("a page has the texts of files and of the library: save what comes through the pipe")
        check_priced(sizes["P"], sizes["M"], "a page has room where ", _MOST_DRAWN)
    compared = compare_schedules(tuple(dict.fromkeys(schedules)), sizes, costs)
    facts = to_json(sizes["P"], sizes["M"], compared, costs, memory)
    click.echo(json.dumps(facts) if as_json else "\n".join(to_text(facts)))
    points = [each.point for each in compared if each.point]
    if output is not None and points:
        from schedc.frontier.points import floor_lines
        from schedc.report.frontier import page_of
        from schedc.report.frontier import to_json as frontier_json

        lines = list(floor_lines(sizes["P"], sizes["M"], costs)) if sizes["P"] <= MOST_RANKS else []
        write(page_of(frontier_json(sizes["P"], sizes["M"], points, lines), points, (), costs), output)
    if any(each.refused for each in compared):
        raise click.exceptions.Exit(FINDINGS)
