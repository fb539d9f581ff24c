"""`schedc plan`: searches the plans of a model on a cluster, and shows what the planner knows of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from schedc.cli.common import EPILOG, json_argument, sizes_argument
from schedc.cli.completion import complete_cluster, complete_model, complete_restriction
from schedc.cli.plan_request import BEST, PlanRequest, PlanUse, read_axes, read_batch, read_skew, use_of
from schedc.cli.plan_shown import SEQUENCE

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(epilog=EPILOG)
@click.argument("model", required=False, shell_complete=complete_model)
@click.argument("cluster", required=False, shell_complete=complete_cluster)
@sizes_argument
@click.option(
    "--batch",
    metavar="NxSEQ",
    callback=read_batch,
    help="Sequences of a step, and tokens of each, for example 4608x8192: search for plans.",
)
@click.option("--top", type=click.IntRange(1, 1000), default=BEST, show_default=True, help="Plans to give.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write plan files, their costs, plans.json, pareto.svg and index.html into a new folder. With --compare: a "
    "page, FILE.html.",
)
@click.option("--force", is_flag=True, help="Write over plans that are there already.")
@click.option(
    "--require", multiple=True, metavar="CONDITION", help="Search only plans that meet it: 'pp >= 4 and ep <= 64'."
)
@click.option("--exclude", multiple=True, metavar="CONDITION", help="Search no plan that meets it.")
@click.option(
    "--restrict",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_restriction,
    help="Search only what a named software stack has.",
)
@click.option(
    "--space",
    type=click.Choice(["standard", "wide"]),
    default="standard",
    show_default=True,
    help="How many values the axes take.",
)
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp16", "fp8", "fp4"]),
    default="bf16",
    show_default=True,
    help="Type of products; CLUSTER needs a peak for it, and the fit rows with it.",
)
@click.option(
    "--skew",
    type=float,
    default=1.0,
    show_default=True,
    metavar="RHO",
    callback=read_skew,
    help="Rows that come to the fullest rank of an expert group, over the mean.",
)
@click.option(
    "--objective",
    type=click.Choice(["step", "memory", "pareto"]),
    default="step",
    show_default=True,
    help="What is best: the shortest step, the least memory, or plans than which none has less of both.",
)
@click.option(
    "--schedules",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Search with the schedules of these .sched files too.",
)
@click.option("--exhaustive", is_flag=True, help="Price every plan, without bounds; for small spaces.")
@click.option(
    "--explain",
    metavar="AXIS=VALUE,...",
    callback=read_axes,
    help="Say where the plan with these axes stands, and why it is not first: tp=8,pp=16,ep=32.",
)
@click.option("--time", "show_time", is_flag=True, help="Show the seconds of each stage of the search.")
@click.option(
    "--limit-seconds",
    type=click.FloatRange(min=0.1),
    help="End the search after so many CPU seconds; say what is certain until then.",
)
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
    """Search for the best plans of MODEL on CLUSTER.

    A plan says how a training step is spread: over tensor, context, expert, data and pipeline ranks, by which schedule,
    with which recomputation. The last line of the output says what no plan of the space undercuts. MODEL is a shipped
    name, a config.json of Hugging Face or its folder, or a model file in TOML. Nothing of it is downloaded or run.
    CLUSTER is a shipped name or a cluster file in TOML; -D devices=N gives it another size. --list has the shipped
    ones. --predict and --compare need neither.
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
        case PlanUse.SEARCH:
            from schedc.cli.plan_searched import searched

            searched(request)
