"""`schedc show`: a schedule as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, cost_arguments, output_argument, schedule_arguments, write

if TYPE_CHECKING:
    from schedc.cost.costs import Costs


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
@output_argument
def show(schedule: str, sizes: dict[str, int], costs: Costs, output: Path | None) -> None:
    """Draw SCHEDULE as SVG."""
    from schedc.compiler import analyse
    from schedc.draw.svg import draw_svg

    analysis = analyse(schedule, sizes, costs)
    write(draw_svg(analysis.schedule, analysis.timeline, analysis.memory), output)
