"""`schedc diff`: what two schedules have in common and what not."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from schedc.cli.common import EPILOG, FINDINGS, cost_arguments, json_argument, schedule_arguments
from schedc.cli.given import ScheduleArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schedc.analysis.difference import Difference, RankDifference
    from schedc.cost.costs import Costs
    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given

_RANKS_SHOWN = 8


@click.command(epilog=EPILOG)
@schedule_arguments
@click.argument("other", type=ScheduleArgument())
@cost_arguments
@json_argument
def diff(schedule: Given, other: Given, sizes: dict[str, int], costs: Costs, as_json: bool) -> None:
    """Compare SCHEDULE with OTHER: order of ops, makespan, bubble, memory and messages.

    -D sets a size of both, or of the one that has it. Exit code 0 if both run the same ops in the same order, else 1.
    """
    from schedc.analysis.difference import compare

    (first, first_costs), (second, second_costs) = _priced((schedule, other), sizes, costs)
    difference = compare(first, second, first_costs, second_costs)
    if as_json:
        click.echo(json.dumps({"schema": "schedc.diff", "version": 1, **difference.to_json()}))
    else:
        click.echo("\n".join(_lines(difference)))
    if not difference.equal:
        sys.exit(FINDINGS)


def _priced(names: tuple[Given, Given], sizes: dict[str, int], costs: Costs) -> list[tuple[Schedule, Costs]]:
    """Both schedules, each with the costs of its stages."""
    from schedc.compiler import priced
    from schedc.diagnostics import Diagnostic, RequestError, did_you_mean
    from schedc.inputs import open_input

    trees = [open_input(name) for name in names]
    of_tree = [{p.name for p in tree.parameters} for tree in trees]
    if unknown := sorted(set(sizes) - set().union(*of_tree)):
        help = did_you_mean(unknown[0], set().union(*of_tree))
        raise RequestError([Diagnostic("S111", f"neither schedule has a size `{unknown[0]}`", help=help)])
    return [
        priced(tree, {name: value for name, value in sizes.items() if name in known}, costs)
        for tree, known in zip(trees, of_tree, strict=True)
    ]


def _lines(difference: Difference) -> Iterator[str]:
    first, second = difference.schedules
    yield f"{_title(first)}  |  {_title(second)}"
    shapes = [(s.ranks, s.stages, s.microbatches) for s in difference.schedules]
    if shapes[0] != shapes[1]:
        yield "ranks, stages and microbatches differ: " + "  |  ".join(", ".join(map(str, shape)) for shape in shapes)
    if difference.equal:
        yield "order: the same on every rank"
    if first.layout != second.layout:
        yield "layers: " + "  |  ".join(s.layout or "nothing said" for s in difference.schedules)
    for rank in difference.ranks[:_RANKS_SHOWN]:
        yield from _rank(rank)
    if (more := len(difference.ranks) - _RANKS_SHOWN) > 0:
        yield f"and {more} more ranks"
    for figure in difference.figures:
        gap = figure.second - figure.first
        yield f"{figure.name:<19}  {figure.first:>12.6g}  {figure.second:>12.6g}" + (f"  {gap:+.6g}" if gap else "")


def _title(schedule: Schedule) -> str:
    return f"{schedule.name} ({', '.join(f'{name} = {value}' for name, value in schedule.sizes.items())})"


def _rank(rank: RankDifference) -> Iterator[str]:
    one, other = (op or "the end" for op in rank.first)
    yield f"rank {rank.rank}: the orders part at op {rank.index}: {one}  |  {other}"
    words = ("only in the first", "only in the second", "moved", "paired otherwise")
    lists = (rank.missing, rank.added, rank.moved, rank.paired)
    for word, ops, count in zip(words, lists, rank.number, strict=True):
        if count:
            yield f"    {word}: {' '.join(ops)}" + (f" … ({count} in all)" if count > len(ops) else "")
