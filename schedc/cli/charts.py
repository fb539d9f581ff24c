"""What `show`, `watch` and `report` speak of: charts of schedules and cells, drawn in each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from schedc.cli.pictures import HTML, TERM, Drawing, in_form

if TYPE_CHECKING:
    from schedc.analysis.cell_pricing import CellPricing
    from schedc.analysis.dependencies import Dependencies
    from schedc.cost.costs import Costs
    from schedc.draw.cell_chart import CellChart
    from schedc.draw.chart import Chart
    from schedc.inputs import Input
    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given


def chart_at(schedule: Given, sizes: Mapping[str, int], costs: Costs) -> Chart:
    """The chart of a schedule at one size; raises `DiagnosticError` if there is none, or it is not legal."""
    from schedc.inputs import open_input

    return _chart(open_input(schedule), sizes, costs)


def charts_at(
    schedules: tuple[Given, Given], sizes: Mapping[str, int], costs: tuple[Costs, Costs]
) -> tuple[Chart, Chart]:
    """Two charts at the same sizes: the second takes the first's value of every size that both have by name.

    A size that only the second has goes to it alone; one that neither has is the first's fault (S1 code).
    """
    from schedc.inputs import open_input

    trees = [open_input(schedule) for schedule in schedules]
    known = [{parameter.name for parameter in tree.parameters} for tree in trees]
    own = {name: value for name, value in sizes.items() if name in known[0] or name not in known[1]}
    first = _chart(trees[0], own, costs[0])
    shared = {**sizes, **first.schedule.sizes}
    common = {parameter.name: shared[parameter.name] for parameter in trees[1].parameters if parameter.name in shared}
    return first, _chart(trees[1], common, costs[1])


def drawing(charts: Sequence[Chart], form: str, *, columns: int, colours: int, width: int | None = None) -> Drawing:
    """The charts in a format; columns (characters) and colours concern the terminal only, width (px) pictures."""
    if form == HTML:
        from schedc.draw.html_page import draw_html

        return Drawing(draw_html(charts))
    if form == TERM:
        from schedc.draw.terminal import draw_terminal

        return Drawing(draw_terminal(charts, columns, colours=colours))
    from schedc.draw.svg import picture

    (chart,) = charts  # a picture shows one schedule
    text, note = picture(chart.schedule, chart.timeline, chart.memory, width=width)
    return Drawing(in_form(text, form), note)


def cell_at(
    schedule: Given, sizes: Mapping[str, int], costs: Costs, kind: str, stages: tuple[int, int] | None
) -> CellChart:
    """A cell of a schedule from inside; wrong usage if the schedule has none of this kind there."""
    from schedc.draw.cell_chart import CellChart

    made, inside = inside_at(schedule, sizes, costs)
    found = inside.kind_on(kind, stages)
    if found is None:
        there = ", ".join(f"{one.kind} on {' & '.join(map(str, dict.fromkeys(one.stages)))}" for one in inside.kinds)
        where = f" on stages {stages[0]} & {stages[1]}" if stages else ""
        raise click.UsageError(f"{made.name} has no cell {kind}{where}; it has for example {there}")
    return CellChart.of(made.name, found, stages or found.stages, inside.costs)


def cell_drawing(chart: CellChart, form: str, *, columns: int, colours: int, width: int | None = None) -> Drawing:
    """A cell's drawing as a picture or for the terminal; see `drawing`."""
    if form == TERM:
        from schedc.draw.cell_term import draw_cell as draw_text

        return Drawing(draw_text(chart, columns, colours=colours))
    from schedc.draw.cell_svg import draw_cell

    return Drawing(in_form(draw_cell(chart, width), form))


def inside_at(name: Given, sizes: Mapping[str, int], costs: Costs) -> tuple[Schedule, CellPricing]:
    """A schedule or plan by name at one size, priced from inside by costs that know of cells.

    Raises `DiagnosticError` where there is no such legal schedule, and S404.
    """
    from schedc.analysis.dependencies import Dependencies
    from schedc.compiler import priced
    from schedc.diagnostics import CompilerBug
    from schedc.inputs import open_input
    from schedc.plan.price_cells import price_cells

    schedule, costs = priced(open_input(name), sizes, costs)
    inside = price_cells(Dependencies.of(schedule), costs)
    if inside is None:
        raise CompilerBug("cells", "cells were asked for with costs that know of none")
    return schedule, inside


def _chart(tree: Input, sizes: Mapping[str, int], costs: Costs) -> Chart:
    from schedc.compiler import priced

    return chart_of(*priced(tree, sizes, costs))


def chart_of(schedule: Schedule, costs: Costs, dependencies: Dependencies | None = None) -> Chart:
    """The chart of a legal schedule under costs of its stages; raises `DiagnosticError` (S404)."""
    from schedc.analysis.dependencies import Dependencies
    from schedc.analysis.memory import measure_memory
    from schedc.analysis.timeline import simulate
    from schedc.draw.chart import Chart

    known = dependencies or Dependencies.of(schedule)
    timeline, memory = simulate(schedule, costs, known), measure_memory(schedule, costs, known)
    return Chart.of(schedule, timeline, memory, costs)
