"""`schedc freeze`: keeps the order that a policy chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, schedule_arguments
from schedc.cli.cost_words import cost_arguments

if TYPE_CHECKING:
    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
def freeze_command(schedule: Given, sizes: dict[str, int], costs: Costs) -> None:
    """Keep the order that a `policy` chooses under these costs.

    The order of SCHEDULE, a .sched file, is written beside it.

    The order is kept as NAME.P4-M8.order and used at those sizes whatever the costs, until this command runs again or
    the file is removed. If the .sched file changes, the order is refused. Where the costs have a table of cells, the
    file notes the digest of the cost file.
    """
    from schedc.elaborate.frozen import freeze as keep
    from schedc.load.library import open_named
    from schedc.plan.order import order_pricer
    from schedc.syntax.input import AppliedPlan

    tree = open_named(schedule)
    if isinstance(tree, AppliedPlan):
        message = f"{tree.name} is a plan: freeze its schedule {tree.schedule.name}, by costs per stage"
        raise click.UsageError(message)
    click.echo(str(keep(tree, sizes, costs, order_pricer(costs))))
