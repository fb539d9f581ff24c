"""`schedc layout`: where the layers of a model lie, what that makes of the ranks' loads, and what it gains."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from schedc.cli.common import EPILOG, asked, json_argument, sizes_argument
from schedc.cli.given import ScheduleArgument

if TYPE_CHECKING:
    from schedc.ir.placement import Placement
    from schedc.ir.schedule import Schedule
    from schedc.layout import Balanced, LayerCosts, Layout, Model
    from schedc.load.library import Given


_SHOWN = 12
"""Balanced layouts that are worked out to be compared; models seldom have more."""


def _places(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | list[int] | None:
    if value is None or value in ("last", "first", "auto"):
        return value
    try:
        return [int(number) for number in value.strip("[]").split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not last, first, auto or numbers of places as 0,15,31") from None


@click.command(epilog=EPILOG)
@click.argument("layout", required=False)
@click.option("--layers", type=click.IntRange(1), help="Number of decoder layers, where LAYOUT is not given.")
@click.option("--dense", type=click.IntRange(0), help="The first so many layers are dense, the others MoE.")
@click.option("--mtp", type=click.IntRange(0), default=0, help="Number of multi-token predictions.")
@click.option("--pad", type=click.IntRange(0), help="Number of paddings, for equally many places in each stage.")
@click.option(
    "--at",
    callback=_places,
    metavar="last|first|auto|NUMBERS",
    help="Where the paddings are among all places, by default last; auto: where the largest rank has least to do.",
)
@click.option("--auto", is_flag=True, help="Balance the layers by their costs; with --pad as --at auto.")
@click.option("--schedule", type=ScheduleArgument(), metavar="SCHEDULE", help="Whose stages, ranks and timeline.")
@click.option("--stages", type=click.IntRange(1), help="Number of stages, one per rank, where no schedule is given.")
@sizes_argument
@click.option(
    "--cost",
    "cost_options",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Time of embedding, dense, moe, mtp or head; parameters.KIND and activations.KIND are memory; F, I, W say how"
    " long the forward and the two backwards of a part of time 1 take; p2p.",
)
@click.option(
    "--cost-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The same as TOML (docs/reference/layers.md); --cost overrides single values.",
)
@click.option(
    "--objective",
    type=click.Choice(["rank", "makespan"]),
    default="rank",
    show_default=True,
    help="With --auto or --at auto: least load of the largest rank, then of the largest stage; or, of the layouts that"
    " trade these two against each other, the one with the shortest step.",
)
@click.option("--memory", type=float, help="With --auto or --at auto: the most that a rank may hold.")
@click.option(
    "--against",
    type=ScheduleArgument(),
    metavar="SCHEDULE",
    default="1f1b",
    show_default=True,
    help="The schedule of one stage per rank that a schedule with several is compared with.",
)
@json_argument
def layout(
    layout: str | None,
    layers: int | None,
    dense: int | None,
    mtp: int,
    pad: int | None,
    at: str | list[int] | None,
    auto: bool,
    schedule: Given | None,
    stages: int | None,
    sizes: dict[str, int],
    cost_options: tuple[str, ...],
    cost_file: Path | None,
    objective: str,
    memory: float | None,
    against: Given,
    as_json: bool,
) -> None:
    """Lay out the layers of a model: by hand, by number, padded, or balanced by costs.

    LAYOUT is a string as Megatron takes it, for example 'Et*3|(tt|)*29,m|L'. Without one, --layers and what follows
    from it make the layout. With --schedule its makespan is compared with those of layers laid out by number.
    """
    from schedc.ir.placement import linear
    from schedc.layout import Model, even, padded, parse_layout
    from schedc.layout.compare import compare, shortest
    from schedc.report.layout import to_json, to_text
    from schedc.report.plan import to_text as plan_text

    balanced = auto or at == "auto"
    _check_usage(layout, layers, mtp, pad, at, balanced, schedule, stages, sizes, memory, objective)
    costs = _layer_costs(cost_options, cost_file)
    with asked():
        given = parse_layout(layout, dense=dense, layers=layers) if layout else None
    order = _legal(schedule, sizes) if schedule else None
    placement = order.placement if order else linear(stages or (len(given.stages) if given else 1), 1)
    proof, others = None, []
    if given is None:
        assert layers is not None
        model = Model(layers, dense, mtp)
        if balanced:
            others = _balanced(model, placement, costs, pad, memory, order)
            proof = shortest(others, order, costs) if objective == "makespan" and order else others[0]
            given = proof.layout
        else:
            given = even(model, placement.stages) if pad is None else padded(model, placement.stages, pad, at or "last")
    with asked() if layout else nullcontext():  # its stages, too, are those of the command line
        comparison = compare(given, order, costs, _one_chunk(order, against), others) if order else None
    facts = to_json(given, placement, costs, proof, comparison)
    attached = _attached(order, given) if order and order.plan else None
    if as_json:
        click.echo(json.dumps(facts | ({"plan": attached} if attached else {})))
        return
    click.echo(to_text(facts))
    for line in plan_text(attached) if attached else ():
        click.echo(line)


def _attached(order: Schedule, layout: Layout) -> dict[str, Any]:
    """What the plan behind --schedule attaches, to the layers as they are laid out here."""
    from schedc.plan import plan_of
    from schedc.report.plan import to_json

    return to_json(plan_of(order), layout)


def _check_usage(
    layout: str | None,
    layers: int | None,
    mtp: int,
    pad: int | None,
    at: str | list[int] | None,
    balanced: bool,
    schedule: Given | None,
    stages: int | None,
    sizes: dict[str, int],
    memory: float | None,
    objective: str,
) -> None:
    wrong = (
        (layout is None and layers is None, "give a LAYOUT, or --layers"),
        (layout is not None and (pad is not None or balanced or mtp > 0), "a LAYOUT says itself where everything is"),
        (at is not None and pad is None, "--at needs --pad"),
        (balanced and at not in (None, "auto"), "--auto leaves no choice to --at"),
        (layout is None and schedule is None and stages is None, "--layers needs --schedule or --stages"),
        (schedule is not None and stages is not None, "--stages follows from --schedule"),
        (bool(sizes) and schedule is None, "-D needs --schedule"),
        (memory is not None and not (balanced and schedule), "--memory needs --auto or --at auto, and --schedule"),
        (
            objective == "makespan" and not (balanced and schedule),
            "--objective makespan needs --auto or --at auto, and --schedule",
        ),
        (memory is not None and not 0 <= memory < 1e15, "--memory is a number from 0"),
    )
    for is_wrong, message in wrong:
        if is_wrong:
            raise click.UsageError(message)


def _balanced(
    model: Model, placement: Placement, costs: LayerCosts, pad: int | None, memory: float | None, order: Schedule | None
) -> list[Balanced]:
    """The best layout, and under a schedule the next ones that trade larger ranks for smaller stages."""
    from schedc.layout import frontier
    from schedc.layout.compare import peak_in_flight

    held = peak_in_flight(order).tolist() if order else None
    found = frontier(model, placement, costs, pad=pad, memory=memory, in_flight=held)
    return list(islice(found, _SHOWN if order else 1))


def _legal(name: Given, sizes: dict[str, int]) -> Schedule:
    from schedc.compiler import legal_schedule
    from schedc.inputs import open_input

    return legal_schedule(open_input(name), sizes)


def _one_chunk(order: Schedule, name: Given) -> Schedule | None:
    """The schedule to compare with, of one stage per rank; None where the given one has no more itself."""
    from schedc.inputs import open_input

    if order.placement.chunks == 1:
        return None
    as_many = {"ranks": order.ranks, "microbatches": order.microbatches}
    parameters = open_input(name).parameters
    return _legal(name, {p.name: as_many[p.role] for p in parameters if p.role in as_many})


def _layer_costs(options: tuple[str, ...], path: Path | None) -> LayerCosts:
    """The costs of the file and the options; a wrong option is wrong usage, a wrong file a finding."""
    from schedc.layout.costs import LayerCosts, load_layer_costs

    base = load_layer_costs(path) if path else LayerCosts()
    with asked():
        return LayerCosts.from_options(options, base)
