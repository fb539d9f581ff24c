"""`schedc plan`: a group of commands that search the plans of a model on a cluster, and show what is known of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from schedc.cli.common import EPILOG, PageFile, json_argument, sizes_argument
from schedc.cli.completion import complete_cluster, complete_model, complete_restriction
from schedc.cli.job import KINDS, OLD_KINDS
from schedc.cli.plan_request import (
    BEST,
    DRAWS,
    SearchRequest,
    above_zero,
    devices_of,
    read_axes,
    read_batch,
    read_draws,
    read_plans,
    read_ramp,
    read_skew,
    read_slow,
    read_tokens,
)
from schedc.cli.spellings import renamed

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

F = TypeVar("F", bound=Callable[..., Any])

_OLD_SPELLINGS = {
    "--list": ("list", 0),
    "--show-model": ("show", 0),
    "--predict": ("predict", 1),
    "--compare": ("compare", 2),
}
"""By an option of `schedc plan` without a command, the command that it means, and how many values the option has.

Without any of them the command is `search`.
"""


class _PlanGroup(click.Group):
    """The commands of `schedc plan`. Arguments that do not begin with a command mean one by their options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = _with_command(args)
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [*super().shell_complete(ctx, incomplete), *complete_model(ctx, self.get_params(ctx)[0], incomplete)]


def _with_command(args: list[str]) -> list[str]:
    """Arguments without a command, with the command in front: ``--json --predict ROWS`` is ``predict ROWS --json``."""
    for place, each in enumerate(args):
        option, equals, value = each.partition("=")
        if option in _OLD_SPELLINGS:
            command, count = _OLD_SPELLINGS[option]
            behind = [value, *args[place + 1 :]] if equals else args[place + 1 :]
            return [command, *behind[:count], *args[:place], *behind[count:]]
    return ["search", *args]


@click.group(cls=_PlanGroup, epilog=EPILOG)
def plan_command() -> None:
    """Search for the best plans of a model on a cluster.

    Its commands also show what is known of both.

    A plan says how a training step is spread: over tensor, context, expert, data and pipeline ranks, by which schedule,
    with which recomputation. MODEL is a shipped name, a config.json of Hugging Face or its folder, or a model file in
    TOML. Nothing of it is downloaded or run. CLUSTER is a shipped name or a cluster file in TOML; -D devices=N gives it
    another size. `schedc plan MODEL CLUSTER --batch NxSEQ` searches, as `schedc plan search` does.
    """


def _output(help: str, path: click.Path | None = None) -> Callable[[F], F]:
    """Adds -o and --force."""
    kind = path or click.Path(path_type=Path)
    output = click.option("-o", "--output", type=kind, metavar="PATH", help=help)
    force = click.option("--force", is_flag=True, help="Write over what is there already.")
    return lambda command: output(force(command))


def _fit(command: F) -> F:
    """Adds --fit and --force-fit."""
    file = click.option(
        "--fit",
        "fit_file",
        type=_FILE,
        metavar="X.fit.toml",
        help="The fit to use; default the one that CLUSTER names, or that lies beside ROWS, else the priors.",
    )
    forced = click.option(
        "--force-fit", is_flag=True, help="Use a fit of another device or precision, and say so in the output."
    )
    return file(forced(command))


@plan_command.command("list", epilog=EPILOG)
@json_argument
def list_shipped_command(as_json: bool) -> None:
    """List shipped models, clusters and fits with their sources."""
    from schedc.cli.plan_shown import listed

    click.echo(listed(as_json))


@plan_command.command("show", epilog=EPILOG)
@click.argument("model", shell_complete=complete_model)
@click.argument("cluster", required=False, shell_complete=complete_cluster)
@sizes_argument
@click.option("--seq", type=click.IntRange(1, 2**31), help="Tokens of a sequence; default MODEL's, else 4,096.")
@json_argument
def show_model_command(model: str, cluster: str | None, sizes: dict[str, int], seq: int | None, as_json: bool) -> None:
    """Print parameters, FLOPs and held tensors of MODEL by part.

    CLUSTER is shown behind it, if it is given.
    """
    from schedc.cli.plan_shown import model_shown

    click.echo(model_shown(model, cluster, devices_of(sizes, cluster), seq, as_json))


@plan_command.command(epilog=EPILOG)
@click.argument("rows", type=_FILE, metavar="ROWS.csv")
@_fit
@json_argument
def predict_command(rows: Path, fit_file: Path | None, force_fit: bool, as_json: bool) -> None:
    """Print predictions beside measured steps.

    ROWS are as `schedc fit` reads them.
    """
    from schedc.cli.plan_shown import rows_predicted

    click.echo(rows_predicted(rows, fit_file, force_fit, as_json))


@plan_command.command("compare", epilog=EPILOG)
@click.argument("first", type=_FILE, metavar="A.sched")
@click.argument("second", type=_FILE, metavar="B.sched")
@_output("Write a page, FILE.html.", PageFile())
@json_argument
def compare_plans_command(first: Path, second: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Say why one of two written plans is faster.

    Prints the waterfalls of A and B beside each other."""
    from schedc.cli.plan_compared import print_comparison

    print_comparison((first, second), output, force, as_json)


@plan_command.command(epilog=EPILOG)
@click.argument("model", shell_complete=complete_model)
@click.argument("cluster", shell_complete=complete_cluster)
@sizes_argument
@click.option(
    "--batch",
    metavar="NxSEQ",
    callback=read_batch,
    required=True,
    help="Sequences of a step, and tokens of each, for example 4608x8192.",
)
@click.option("--top", type=click.IntRange(1, 1000), default=BEST, show_default=True, help="Plans to give.")
@_output("Write plan files, their costs, plans.json, pareto.svg and index.html into a new folder.")
@click.option(
    "--require", multiple=True, metavar="CONDITION", help="Search only plans that meet it: 'pp >= 4 and ep <= 64'."
)
@click.option("--exclude", multiple=True, metavar="CONDITION", help="Search no plan that meets the condition.")
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
@renamed(
    "--job",
    "--jobs",
    values=OLD_KINDS,
    type=click.Choice(KINDS),
    help="With -o, write a job for each plan that this runtime runs: for Slurm, SkyPilot or Kubeflow Trainer.",
)
@click.option("--space-facts", is_flag=True, help="Search nothing: list what plans have, and what is left out and why.")
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp16", "fp8", "fp4"]),
    default="bf16",
    show_default=True,
    help="Type of products; CLUSTER needs a peak for it, and the fit rows with it.",
)
@click.option(
    "--skew",
    metavar="RHO",
    callback=read_skew,
    help="Rows of an expert group's fullest rank over the mean: 1.4; 1.4@32 of 32 ranks; cv=0.3, a spread.",
)
@click.option(
    "--routing",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Rows of the ranks of an expert group as `Pipeline.record_routing` saved them; larger groups by their spread.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A recorded routing by which plans are priced under each way to copy experts.",
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
@click.option(
    "--tokens",
    metavar="N",
    callback=read_tokens,
    help="Tokens of a training run, for example 15T: prints its days and device-hours.",
)
@click.option(
    "--price",
    metavar="P",
    callback=above_zero("what a device costs in an hour"),
    help="Price of a device-hour: prints the cost of the run.",
)
@click.option(
    "--watts",
    metavar="W",
    callback=above_zero("the watts of a device"),
    help="Watts of a device with its share of the machine.",
)
@click.option(
    "--mtbf",
    metavar="HOURS",
    callback=above_zero("the mean hours between failures of one device"),
    help="Mean hours between failures of one device.",
)
@click.option(
    "--checkpoint",
    metavar="SECONDS",
    callback=above_zero("the seconds of a checkpoint", zero=True),
    help="How long training stands still for a checkpoint.",
)
@click.option(
    "--restart",
    metavar="SECONDS",
    callback=above_zero("the seconds of a restart", zero=True),
    help="From a failure to the first step after it.",
)
@click.option(
    "--ramp",
    metavar="START:END@TOKENS",
    callback=read_ramp,
    help="Steps of START sequences at first, more by START (START:END:INCREMENT) until TOKENS are trained.",
)
@click.option(
    "--slow",
    metavar="TIMESxN",
    callback=read_slow,
    help="N devices take so many times as long, 1.2x1: prints the step then, at their worst places.",
)
@click.option("--exhaustive", is_flag=True, help="Price every plan, without bounds; for small spaces.")
@click.option(
    "--explain",
    metavar="[AXIS=VALUE,...]",
    is_flag=False,
    flag_value="",
    callback=read_axes,
    help="Say at which constants another plan is as fast, and where the plan with these axes stands: tp=8,pp=16.",
)
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME",
    help="With --explain: change only this constant, figure or level of the cluster; default all.",
)
@click.option(
    "--also",
    multiple=True,
    metavar="AXIS=VALUE,...",
    callback=read_plans,
    help="List the best plan with these axes, too: tp=8,pp=16,ep=32. May be given several times.",
)
@click.option(
    "--draws",
    default=str(DRAWS),
    show_default=True,
    metavar="N|off",
    callback=read_draws,
    help="Draws of the constants under which plans are compared.",
)
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Seed of the draws.")
@click.option(
    "--stack",
    metavar="NAME",
    default="",
    help="The software that trains: a shipped fit, or a file, whose stack's constants and traits are used.",
)
@renamed("--timings", "--time", "show_time", is_flag=True, help="Show the seconds of each stage of the search.")
@click.option(
    "--limit-seconds",
    type=click.FloatRange(min=0.1),
    help="End the search after so many CPU seconds; say what is certain until then.",
)
@_fit
@json_argument
def search_command(sizes: dict[str, int], **options: Any) -> None:
    """Search for the best plans of MODEL on CLUSTER.

    The last line of the output says what no plan of the space undercuts. `schedc plan list` has the shipped models and
    clusters.
    """
    from schedc.cli.plan_searched import searched

    searched(SearchRequest(devices=devices_of(sizes, options["cluster"]), **options))
