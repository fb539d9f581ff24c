"""`schedc layout`: assigns the layers of a model to stages, and compares the loads of the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from schedc.cli.common import EPILOG, asked, json_argument, sizes_argument
from schedc.cli.given import ScheduleArgument
from schedc.cli.plan_request import above_zero
from schedc.cli.spellings import renamed

if TYPE_CHECKING:
    from schedc.ir.placement import Placement
    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given
    from schedc.plan.layout import Balanced, LayerCosts, Layout, Model


_EMBEDS = {"mtp": (False,), "first": (True,), "auto": (False, True)}
"""By `--embed`: whether the first stage embeds the tokens of predictions."""
_SHOWN = 12
"""Balanced layouts that are compared under a schedule; models seldom have more."""


def _paddings(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | list[int] | None:
    if value is None or value in ("last", "first", "auto"):
        return value
    try:
        return [int(number) for number in value.strip("[]").split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not last, first, auto or numbers of places as 0,15,31") from None


@dataclass(frozen=True)
class LayoutRequest:
    """The arguments and options of `layout`, by the names that click gives them."""

    layout: str | None
    layers: int | None
    dense: int | None
    mtp: int
    losses: str
    embed: str
    pad: int | None
    at: str | list[int] | None
    auto: bool
    schedule: Given | None
    stages: int | None
    sizes: dict[str, int]
    cost_options: tuple[str, ...]
    cost_file: Path | None
    objective: str
    limit: float | None
    against: Given
    as_json: bool

    @property
    def balanced(self) -> bool:
        """Whether the layers, or the paddings, are placed by costs."""
        return self.auto or self.at == "auto"

    @property
    def models(self) -> Iterator[Model]:
        """The models that are laid out; the command chooses among their layouts."""
        from schedc.plan.layout import Model

        assert self.layers is not None
        for embeds_first in _EMBEDS[self.embed]:
            for losses in {"one": (1,), "each": (self.mtp + 1,), "auto": (1, self.mtp + 1)}[self.losses]:
                yield Model(self.layers, self.dense, self.mtp, losses, embeds_first)


@click.command(epilog=EPILOG)
@click.argument("layout", required=False)
@click.option("--layers", type=click.IntRange(1), help="Number of decoder layers, where LAYOUT is not given.")
@click.option(
    "--dense", type=click.IntRange(0), help="Number of dense layers, which come first: all, or the others are MoE."
)
@click.option("--mtp", type=click.IntRange(0), default=0, help="Number of multi-token predictions.")
@click.option(
    "--losses",
    type=click.Choice(["one", "each", "auto"]),
    default="one",
    show_default=True,
    help="With --mtp. one: one head forms the losses of all outputs, in the last stage. each: a head per output, in the"
    " last stages. auto: whichever makes the shorter step.",
)
@click.option(
    "--embed",
    type=click.Choice(list(_EMBEDS)),
    default="mtp",
    show_default=True,
    help="With --mtp: the stage that embeds the tokens of predictions. mtp: their own. first: the first, letter e."
    " auto: whichever leaves the fullest rank more memory, then makes the shorter step.",
)
@click.option("--pad", type=click.IntRange(0), help="Number of paddings, for equally many places in each stage.")
@click.option(
    "--at",
    callback=_paddings,
    metavar="last|first|auto|NUMBERS",
    help="Positions of the paddings among all places, by default last. auto: for the least load of the largest rank.",
)
@click.option("--auto", is_flag=True, help="Balance the layers by their costs; with --pad as --at auto.")
@click.option(
    "--schedule",
    type=ScheduleArgument(),
    metavar="SCHEDULE",
    help="The schedule that gives stages, ranks and timeline.",
)
@click.option("--stages", type=click.IntRange(1), help="Number of stages, one per rank, where no schedule is given.")
@sizes_argument
@renamed(
    "--layer-cost",
    "--cost",
    "cost_options",
    multiple=True,
    metavar="NAME=NUMBER",
    help="embedding, dense, moe, mtp, head: time of a part. parameters.KIND, activations.KIND: memory. F, I, W: times"
    " of the forward and of the two backwards, for a part of time 1. p2p: time of a message.",
)
@renamed(
    "--layer-cost-file",
    "--cost-file",
    "cost_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The same as TOML (docs/reference/layers.md); --layer-cost overrides single values.",
)
@click.option(
    "--objective",
    type=click.Choice(["rank", "makespan"]),
    default="rank",
    show_default=True,
    help="With --auto or --at auto. rank: the least load of the largest rank, then of the largest stage. makespan: the"
    " shortest step among the layouts that trade these two loads against each other.",
)
@renamed(
    "--limit",
    "--memory",
    metavar="NUMBER",
    callback=above_zero("the most that a rank may hold in the unit of the costs", zero=True),
    help="With --auto or --at auto: the most that a rank may hold, in the unit of the costs "
    "activations.KIND and parameters.KIND.",
)
@click.option(
    "--against",
    type=ScheduleArgument(),
    metavar="SCHEDULE",
    default="1f1b",
    show_default=True,
    help="A schedule with one stage per rank, with which a schedule with several is compared.",
)
@json_argument
def layout_command(**options: Any) -> None:
    """Lay out the layers of a model on the stages.

    By hand, by number, padded, or balanced by costs.

    LAYOUT is a string as Megatron takes it, for example 'Et*3|(tt|)*29,m|L'. Without LAYOUT, --layers and its options
    make a layout. With --schedule, the makespan is compared with that of layers laid out by number.
    """
    from schedc.ir.placement import linear
    from schedc.plan.layout import parse_layout
    from schedc.plan.layout.compare import best_variant, compare_layouts, need_stages
    from schedc.report.layout import to_json

    request = LayoutRequest(**options)
    _check_usage(request)
    layout, schedule = request.layout, request.schedule
    costs = _layer_costs(request.cost_options, request.cost_file)
    with asked():
        chosen = parse_layout(layout, dense=request.dense, layers=request.layers) if layout else None
    order = _legal(schedule, request.sizes) if schedule else None
    stages = request.stages or (len(chosen.stages) if chosen else 1)
    placement = order.placement if order else linear(stages, 1)
    proof: Balanced | None = None
    others: Sequence[Balanced] = ()
    variants: list[Layout] = []
    if chosen is None:
        ways = [_laid_out(request, model, placement, costs, order) for model in request.models]
        best = best_variant([way.layout for way in ways], order, costs, by_memory=request.embed == "auto")
        variants = [way.layout for way in ways if way is not ways[best]]
        chosen, proof, others = ways[best]
    with asked() if layout else nullcontext():  # the number of stages in LAYOUT is the command line's, too
        if order is None:
            need_stages(chosen, placement, f"--stages says {stages}")
        against = _one_chunk(order, request.against) if order else None
        comparison = compare_layouts(chosen, order, costs, against, others, variants) if order else None
    attached = _attached(order, chosen) if order else None
    _print(to_json(chosen, placement, costs, proof, comparison), attached, request.as_json)


def _print(facts: dict[str, Any], attached: dict[str, Any] | None, as_json: bool) -> None:
    """Prints the facts of a layout, and of the plan that is attached to it, if any."""
    from schedc.report.layout import to_text
    from schedc.report.plan import to_text as plan_text

    if as_json:
        click.echo(json.dumps(facts | ({"plan": attached} if attached else {})))
    else:
        click.echo("\n".join([to_text(facts), *(plan_text(attached) if attached else ())]))


def _attached(order: Schedule, layout: Layout) -> dict[str, Any] | None:
    """The facts of the plan of --schedule, for the layers as they are laid out here; None for a schedule alone."""
    from schedc.ir.plan import NO_PLAN
    from schedc.report.plan import to_json

    return None if order.plan == NO_PLAN else to_json(order.plan, layout, order)


def _check_usage(request: LayoutRequest) -> None:
    """Raises `click.UsageError` for options that exclude or need each other."""
    layout, layers, pad, at, balanced = request.layout, request.layers, request.pad, request.at, request.balanced
    schedule, stages = request.schedule, request.stages
    spread = (request.losses, request.embed) != ("one", "mtp")
    wrong = (
        (layout is None and layers is None, "give a LAYOUT, or --layers"),
        (
            layout is not None and (pad is not None or balanced or request.mtp > 0 or spread),
            "a LAYOUT says itself where everything is",
        ),
        (spread and not request.mtp, "--losses and --embed need --mtp"),
        (
            "auto" in (request.losses, request.embed) and schedule is None,
            "--losses auto and --embed auto need --schedule",
        ),
        (at is not None and pad is None, "--at needs --pad"),
        (balanced and at not in (None, "auto"), "--auto leaves no choice to --at"),
        (layout is None and schedule is None and stages is None, "--layers needs --schedule or --stages"),
        (schedule is not None and stages is not None, "--stages follows from --schedule"),
        (bool(request.sizes) and schedule is None, "-D needs --schedule"),
        (
            request.limit is not None and not (balanced and schedule),
            "--limit needs --auto or --at auto, and --schedule",
        ),
        (
            request.objective == "makespan" and not (balanced and schedule),
            "--objective makespan needs --auto or --at auto, and --schedule",
        ),
    )
    for is_wrong, message in wrong:
        if is_wrong:
            raise click.UsageError(message)


class LaidOut(NamedTuple):
    """The layout of a model. proof, others: of a balanced layout, its proof and the other balanced layouts."""

    layout: Layout
    proof: Balanced | None = None
    others: Sequence[Balanced] = ()


def _laid_out(
    request: LayoutRequest, model: Model, placement: Placement, costs: LayerCosts, order: Schedule | None
) -> LaidOut:
    """The layout of a model as the options say."""
    if not request.balanced:
        return LaidOut(_by_number(request, model, placement.stages))
    proof, others = _balanced(request, model, placement, costs, order)
    return LaidOut(proof.layout, proof, others)


def _by_number(request: LayoutRequest, model: Model, stages: int) -> Layout:
    """The layout with equal numbers of layers, or of places, in each stage."""
    from schedc.plan.layout import even, padded

    return even(model, stages) if request.pad is None else padded(model, stages, request.pad, request.at or "last")


def _balanced(
    request: LayoutRequest, model: Model, placement: Placement, costs: LayerCosts, order: Schedule | None
) -> tuple[Balanced, list[Balanced]]:
    """The best layout; and the layouts to compare, which under a schedule trade larger ranks for smaller stages."""
    from schedc.plan.layout import frontier
    from schedc.plan.layout.compare import peak_in_flight, shortest

    in_flight = peak_in_flight(order).tolist() if order else None
    layouts = frontier(model, placement, costs, pad=request.pad, memory=request.limit, in_flight=in_flight)
    others = list(islice(layouts, _SHOWN if order else 1))
    return (shortest(others, order, costs) if request.objective == "makespan" and order else others[0]), others


def _legal(name: Given, sizes: dict[str, int]) -> Schedule:
    from schedc.compiler import legal_schedule
    from schedc.inputs import open_input

    return legal_schedule(open_input(name), sizes)


def _one_chunk(order: Schedule, name: Given) -> Schedule | None:
    """The schedule to compare with, of one stage per rank; None if ``order`` itself has one stage per rank."""
    from schedc.inputs import open_input

    if order.placement.chunks == 1:
        return None
    sizes = {"ranks": order.ranks, "microbatches": order.microbatches}
    parameters = open_input(name).parameters
    return _legal(name, {p.name: sizes[p.role] for p in parameters if p.role in sizes})


def _layer_costs(options: tuple[str, ...], path: Path | None) -> LayerCosts:
    """The costs by the options and the file. A wrong option is wrong usage; a wrong file is a finding."""
    from schedc.plan.layout.costs import LayerCosts, load_layer_costs

    base = load_layer_costs(path) if path else LayerCosts()
    with asked():
        return LayerCosts.from_options(options, base)
