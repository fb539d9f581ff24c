"""`schedc plan`: what a model holds and computes, what a cluster gives, and written plans beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from schedc.cli.common import EPILOG, json_argument, sizes_argument
from schedc.cli.completion import complete_cluster, complete_model
from schedc.cli.plan_request import PlanRequest, PlanUse, use_of
from schedc.cli.plan_shown import SEQUENCE

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(epilog=EPILOG)
@click.argument("model", required=False, shell_complete=complete_model)
@click.argument("cluster", required=False, shell_complete=complete_cluster)
@sizes_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="With --compare: write the waterfalls as a page.",
)
@click.option("--force", is_flag=True, help="Write over a page that is there already.")
@click.option("--show-model", is_flag=True, help="Print parameters, FLOPs and held tensors of MODEL, part by part.")
@click.option("--list", "as_list", is_flag=True, help="List the shipped models, clusters and fits with their sources.")
@click.option(
    "--seq",
    type=click.IntRange(1, 2**31),
    help=f"With --show-model: tokens of a sequence; default MODEL's, else {SEQUENCE:,}.",
)
@click.option(
    "--predict",
    type=_FILE,
    metavar="ROWS.csv",
    help="Predict measured steps, as `schedc fit` reads them, and print predictions beside measurements.",
)
@click.option(
    "--compare",
    type=_FILE,
    nargs=2,
    metavar="A.sched B.sched",
    help="Why A is faster than B: the waterfalls of two written plans beside each other.",
)
@click.option(
    "--fit",
    "fit_file",
    type=_FILE,
    metavar="X.fit.toml",
    help="The fit to use; default the one that CLUSTER names, or that lies beside ROWS, else the priors.",
)
@click.option("--force-fit", is_flag=True, help="Use a fit of another device or precision, and say so in the output.")
@json_argument
def plan(**options: Any) -> None:
    """Show what MODEL holds and computes, and what CLUSTER gives.

    MODEL is a shipped name, a config.json of Hugging Face or its folder, or a model file in TOML. Nothing of it is
    downloaded or run. CLUSTER is a shipped name or a cluster file in TOML; -D devices=N gives it another size.
    --predict ROWS.csv and --compare need neither.
    """
    request = PlanRequest(**options)
    context = click.get_current_context()
    given = [name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    match use_of(request, given):
        case PlanUse.LIST:
            from schedc.cli.plan_shown import listed

            click.echo(listed(request))
        case PlanUse.SHOW:
            from schedc.cli.plan_shown import shown

            click.echo(shown(request))
        case PlanUse.PREDICT:
            from schedc.cli.plan_shown import predicted

            click.echo(predicted(request))
        case PlanUse.COMPARE:
            from schedc.cli.plan_compared import compared

            compared(request)
