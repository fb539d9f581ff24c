"""Timelines of plan files as pictures, priced by the cost files that lie beside them."""

from __future__ import annotations

from pathlib import Path

from schedc.compiler import price
from schedc.cost.costs import load_costs
from schedc.draw.svg import picture
from schedc.inputs import open_input
from schedc.plan.price_cells import price_order
from schedc.report.plan_folder import COSTS_SUFFIX

_WIDTH = 1320.0
"""px of a timeline on a page."""


def costs_of(plan: Path) -> Path:
    """The cost file of a plan file: ``01.costs.toml`` beside ``01.sched``."""
    return plan.with_name(plan.stem + COSTS_SUFFIX)


def timeline_svg(plan: Path) -> str:
    """The picture of a plan's order under its costs, in seconds.

    With a table [cell] the times are those from inside cells. Raises `DiagnosticError` for files that do not compile.
    """
    step = price(open_input(str(plan)), {}, load_costs(costs_of(plan)))
    timeline = step.timeline() if step.costs.cell is None else price_order(step.dependencies, step.costs)
    return picture(step.schedule, timeline, step.memory(), step.works, width=_WIDTH).text
