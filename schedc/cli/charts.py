"""Charts in the format that `show` and `watch` are asked for, and the choice of one cell by its kind and stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from schedc.cli.pictures import HTML, TERM, Drawing, in_form

if TYPE_CHECKING:
    from schedc.drawing.cell_chart import CellChart
    from schedc.drawing.chart import Chart
    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs


def drawing(charts: Sequence[Chart], form: str, *, columns: int, colours: int, width: int | None = None) -> Drawing:
    """The charts in a format; columns (characters) and colours concern the terminal only, width (px) pictures."""
    left_out = "; ".join(chart.note for chart in charts if chart.note)
    if form == HTML:
        from schedc.drawing.html_page import draw_html

        return Drawing(draw_html(charts), left_out)
    if form == TERM:
        from schedc.drawing.terminal import draw_terminal

        return Drawing(draw_terminal(charts, columns, colours=colours), left_out)
    from schedc.drawing.svg import picture

    (chart,) = charts  # a picture shows one schedule
    facts = chart.schedule, chart.timeline, chart.memory, chart.works
    text, note = picture(*facts, copies=chart.copies, origin=chart.origin, width=width)
    return Drawing(in_form(text, form), "; ".join(filter(None, (note, left_out))))


def cell_drawing(chart: CellChart, form: str, *, columns: int, colours: int, width: int | None = None) -> Drawing:
    """The inside of a cell as a picture or for the terminal; the other parameters are those of `drawing`."""
    if form == TERM:
        from schedc.drawing.cell_term import draw_cell_terminal as draw_text

        return Drawing(draw_text(chart, columns, colours=colours))
    from schedc.drawing.cell_svg import draw_cell_svg

    return Drawing(in_form(draw_cell_svg(chart, width), form))


def cell_at(
    name: Given, sizes: Mapping[str, int], costs: Costs, kind: str, stages: tuple[int, int] | None
) -> CellChart:
    """The inside of a cell of this kind; raises `click.UsageError` if the schedule has none on these stages."""
    from schedc.drawing.cell_chart import CellChart
    from schedc.report.charts import cell_pricing_at

    schedule, pricing = cell_pricing_at(name, sizes, costs)
    cell = pricing.kind_on(kind, stages)
    if cell is None:
        examples = ", ".join(f"{k.kind} on {' & '.join(map(str, dict.fromkeys(k.stages)))}" for k in pricing.kinds)
        where = f" on stages {stages[0]} & {stages[1]}" if stages else ""
        raise click.UsageError(f"{schedule.name} has no cell {kind}{where}; it has for example {examples}")
    return CellChart.of(schedule.name, cell, stages or cell.stages, pricing.costs, pricing.group)
