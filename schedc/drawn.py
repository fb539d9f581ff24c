"""Drawings for Python: a notebook shows the value that `schedc.draw` returns, and a script writes it to a file."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from functools import cached_property
from html import escape

from schedc.compiler import Analysis, costs_or_units
from schedc.drawing.chart import Chart
from schedc.drawing.html_page import draw_html
from schedc.drawing.svg import Picture, picture
from schedc.drawing.terminal import draw_terminal
from schedc.load.library import Given
from schedc.report.charts import chart_at, chart_of
from schedc.step.costs.costs import Costs

_COLUMNS = 100
"""Characters of a line of a printed drawing."""


@dataclass(frozen=True, eq=False, repr=False)
class DrawnSchedule:
    """A drawing of a schedule at one size. A notebook shows it as a picture; `print` draws with characters.

    chart: the schedule with its timeline, memory and figures.
    """

    chart: Chart

    @property
    def svg(self) -> str:
        """The text of the SVG that ``schedc show -o FILE.svg`` writes."""
        return self._picture.text

    @property
    def html(self) -> str:
        """The page to explore that ``schedc show -o FILE.html`` writes: zoom, hover, idle time by its cause."""
        return draw_html([self.chart])

    @cached_property
    def _picture(self) -> Picture:
        chart = self.chart
        facts = chart.schedule, chart.timeline, chart.memory, chart.works
        return picture(*facts, copies=chart.copies, origin=chart.origin)

    def _repr_html_(self) -> str:
        """The SVG as an image of its own, whose styles meet no others of the notebook."""
        data = b64encode(self.svg.encode()).decode()
        image = f'<img alt="{escape(self.chart.title)}" src="data:image/svg+xml;base64,{data}">'
        notes = "; ".join(filter(None, (self._picture.note, self.chart.note)))
        return f"{image}<p>{escape(notes)}</p>" if notes else image

    def __str__(self) -> str:
        return draw_terminal([self.chart], _COLUMNS, colours=0)

    def __repr__(self) -> str:
        return f"<DrawnSchedule of {self.chart.title}>"


def draw(source: Given | Analysis, *, costs: Costs | None = None, **sizes: int) -> DrawnSchedule:
    """Draw a schedule at one size: ``schedc.draw("zbv", P=4, M=8)``.

    source, costs, sizes: as for `compile`. An `Analysis` is drawn at its own sizes and costs.

    Raises `DiagnosticError` for a schedule that is unknown or not legal.
    """
    if not isinstance(source, Analysis):
        return DrawnSchedule(chart_at(source, sizes, costs_or_units(costs)))
    if costs is not None or sizes:
        raise TypeError("an Analysis is drawn at its own sizes and costs")
    return DrawnSchedule(chart_of(source))
