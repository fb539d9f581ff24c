"""`schedc show`: draws a schedule as a picture, as a page to explore, or in the terminal, alone or with another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from schedc.cli.charts import cell_at, cell_drawing, drawing
from schedc.cli.common import (
    EPILOG,
    asked,
    output_argument,
    replicas_argument,
    schedule_arguments,
    slices_argument,
)
from schedc.cli.cost_words import cost_arguments, cost_origin
from schedc.cli.given import ScheduleArgument
from schedc.cli.graphs import CELLS, DEPENDENCIES, GRAPHS, GraphName, graph_at, write_graph
from schedc.cli.pictures import (
    FORMS_OF_CELLS,
    FORMS_OF_CHARTS,
    FORMS_OF_GRAPHS,
    HTML,
    TERM,
    check_converter,
    check_width,
    format_of,
    format_option,
    width_option,
    write_drawing,
)
from schedc.cli.recorded import record_argument
from schedc.cli.traced import charts_of_trace

if TYPE_CHECKING:
    from schedc.drawing.chart import Chart
    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs


KINDS = ("F", "I", "B", "W", "R", "FB", "FI", "FW", "IW")
"""Kinds of cells, as `schedc.cell.program` has them. That module is imported only where it is used."""

_CHART = ("a chart", FORMS_OF_CHARTS)


def _stages(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Reads ``0,7`` or ``3``: the stages of the forward and of the backward."""
    if value is None:
        return None
    words = value.split(",")
    if len(words) > 2 or not all(word.strip().isdecimal() and len(word) < 9 for word in words):
        raise click.BadParameter(f"{value!r} is not STAGE or STAGE,STAGE (for example 0,7)")
    return int(words[0]), int(words[-1])


@dataclass(frozen=True)
class ShowRequest:
    """The arguments and options of `show`, by the names that click gives them."""

    schedule: Given
    sizes: dict[str, int]
    costs: Costs
    wanted: str | None
    width: int | None
    other: Given | None
    other_costs: tuple[str, ...]
    trace: Path | None
    kind: str | None
    stages: tuple[int, int] | None
    graph: str | None
    replicas: int | None
    output: Path | None


@click.command(epilog=EPILOG)
@schedule_arguments
@slices_argument
@cost_arguments
@record_argument
@format_option
@width_option
@click.option(
    "--with",
    "other",
    type=ScheduleArgument(),
    metavar="SCHEDULE",
    help="Draw a second schedule below, on the same time axis and at the same sizes (html and term).",
)
@click.option(
    "--with-cost",
    "other_costs",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Cost for the second schedule only, overriding --cost: its stages may be larger or smaller.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Draw the run of a trace that `schedc run --trace` wrote, as measured, above its prediction (html). Costs are "
    "in ms; default: those that the run wrote beside the trace.",
)
@click.option(
    "--cell",
    "kind",
    type=click.Choice(KINDS),
    help="Draw the inside of one cell of this kind, above its serial order; needs a cost file with a table [cell].",
)
@click.option(
    "--cell-stages",
    "stages",
    metavar="STAGE[,STAGE]",
    callback=_stages,
    help="The stage of that cell; for a pair, the stages of its two ops. Default: the most frequent.",
)
@click.option(
    "--graph",
    is_flag=False,
    flag_value=DEPENDENCIES,
    type=GraphName(GRAPHS),
    metavar="[NAME]",
    help="Draw a graph in place of the lanes, laid out by graphviz. dependencies (the default): what each cell waits "
    "for, with the critical path marked. cells: the segments and exchanges of a stage (by --cell-stages).",
)
@replicas_argument
@output_argument
def show_command(**options: Any) -> None:
    """Draw SCHEDULE."""
    from schedc.cli.screen import colours_of, width_of

    request = ShowRequest(**options)
    graph, kind, output, width = request.graph, request.kind, request.output, request.width
    what, able = ("a graph", FORMS_OF_GRAPHS) if graph else ("a cell", FORMS_OF_CELLS) if kind else _CHART
    form = format_of(request.wanted, output, able, what)
    _check_usage(request, form)
    check_width(width, form)
    if graph:
        stage = request.stages[0] if request.stages else None
        drawn = graph_at(graph, request.schedule, request.sizes, request.costs, stage)
        write_graph(drawn, form, output, width, asked=bool(request.wanted or output))
        return
    check_converter(form)
    screen = {"columns": width_of(output), "colours": colours_of(output)}
    if kind:
        cell = cell_at(request.schedule, request.sizes, request.costs, kind, request.stages)
        write_drawing(cell_drawing(cell, form, width=width, **screen), output)
        return
    write_drawing(drawing(_charts(request), form, width=width, **screen), output)


def _check_usage(request: ShowRequest, form: str) -> None:
    """Raises `click.UsageError` for options that exclude or need each other."""
    other, trace, kind, graph, stages = request.other, request.trace, request.kind, request.graph, request.stages
    misuses = (
        (graph and (other or kind or trace), "--graph is drawn alone, without --with, --cell and --trace"),
        (kind and (other or trace), "--cell is drawn alone, without --with and --trace"),
        (kind and request.costs.cell is None, "--cell needs --cost-file with a table [cell] (docs/inside/cells.md)"),
        (stages and not kind and graph != CELLS, "--cell-stages needs --cell, or --graph cells"),
        (stages and graph and stages[0] != stages[1], "--cell-stages of a graph is one stage"),
        (other and form not in (HTML, TERM), "--with needs --format html or --format term"),
        (request.other_costs and not other, "--with-cost needs --with"),
        (trace and (other or form != HTML), "--trace is drawn without --with, with --format html or -o FILE.html"),
        (
            request.replicas and (other or kind or trace or graph),
            "--replicas is drawn without --with, --cell, --graph and --trace",
        ),
    )
    for misused, message in misuses:
        if misused:
            raise click.UsageError(message)


def _charts(request: ShowRequest) -> list[Chart]:
    """The charts to draw, from the top down."""
    from schedc.report.charts import chart_at, charts_at

    schedule, sizes, costs = request.schedule, request.sizes, request.costs
    if request.trace:
        return list(charts_of_trace(schedule, sizes, costs, cost_origin(), request.trace))
    if request.other:
        return list(charts_at((schedule, request.other), sizes, (costs, _over(costs, request.other_costs))))
    return [chart_at(schedule, sizes, costs, request.replicas)]


def _over(costs: Costs, options: tuple[str, ...]) -> Costs:
    """The costs, overridden by --with-cost; a wrong option is wrong usage."""
    from schedc.step.costs.costs import Costs

    with asked():
        return Costs.from_options(options, base=costs)
