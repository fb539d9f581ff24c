"""A page of schedules, above each other on one time axis."""

from __future__ import annotations

from collections.abc import Sequence

from schedc.drawing.chart import Chart
from schedc.drawing.html_data import page_data
from schedc.drawing.offline_page import offline_page

_SCRIPTS = (
    "elements.js", "columns.js", "model.js", "view.js", "paint.js", "lanes.js", "works.js", "panels.js", "link.js",
    "main.js",
)  # fmt: skip


def draw_html(charts: Sequence[Chart]) -> str:
    """The page of one schedule, or of several above each other; the same input gives the same bytes."""
    title = " and ".join(chart.title for chart in charts)
    return offline_page("page.html", title=title, styles=["page.css"], scripts=_SCRIPTS, data=page_data(charts))
