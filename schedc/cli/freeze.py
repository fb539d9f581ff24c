"""`schedc freeze`: keep the order that a policy chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, cost_arguments, schedule_arguments

if TYPE_CHECKING:
    from schedc.cost.costs import Costs
    from schedc.load.library import Given


@click.command(epilog=EPILOG)
@schedule_arguments
@cost_arguments
def freeze(schedule: Given, sizes: dict[str, int], costs: Costs) -> None:
    """Order SCHEDULE, a .sched file with a `policy`, by these costs, and keep the order beside it.

    The order kept, NAME.P4-M8.order, is used at those sizes whatever the costs, until this command runs again or the
    file is removed. Where the .sched file has changed since, it is refused.
    """
    from schedc.load.frozen import freeze as keep
    from schedc.load.library import Plan, open_named

    found = open_named(schedule)
    if isinstance(found, Plan):
        message = f"{found.name} is a plan: freeze its schedule {found.schedule.name}, by costs per stage"
        raise click.UsageError(message)
    click.echo(str(keep(found, sizes, costs)))
