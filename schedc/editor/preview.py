"""Draws a text for the pane beside it: the page of `schedc show -o FILE.html`, at the default sizes."""

from __future__ import annotations

from schedc.diagnostics import DiagnosticError
from schedc.drawing.html_page import draw_html
from schedc.load.library import Text
from schedc.report.charts import chart_at
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.syntax.parser import parse


def preview(source: Source) -> str | None:
    """A page with the schedules and plans of a text; None where one has a finding, or no default sizes."""
    try:
        file = parse(source)
        names = [*(tree.name for tree in file.schedules), *(plan.name for plan in file.plans)]
        return draw_html([chart_at(Text(source, name), {}, Costs()) for name in names]) if names else None
    except DiagnosticError:
        return None
