"""Charts of library schedules for tests."""

from __future__ import annotations

from schedc.drawing.chart import Chart
from schedc.elaborate import elaborate
from schedc.load.library import open_schedule
from schedc.step.costs.costs import Costs


def library_chart(name: str, costs: Costs | None = None, **sizes: int) -> Chart:
    """The chart of a library schedule at a size, by default under unit costs."""
    return Chart.predicted(elaborate(open_schedule(name), sizes), costs or Costs())
