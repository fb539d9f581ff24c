"""Graphs that `show` draws: the dependencies of a schedule, and a stage from inside; or their source without `dot`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING

import click

from schedc.cli.common import USAGE, write
from schedc.cli.pictures import DOT

if TYPE_CHECKING:
    from graphviz import Digraph

    from schedc.cost.costs import Costs
    from schedc.inputs import Input
    from schedc.ir.schedule import Schedule
    from schedc.load.library import Given

DEPENDENCIES, CELLS = "dependencies", "cells"
GRAPHS = (DEPENDENCIES, CELLS)

_REMEDY = "install graphviz (apt-get install graphviz, brew install graphviz)"


class GraphName(click.Choice[str]):
    """A name of a graph. Where SCHEDULE follows ``--graph`` in its place, the error tells the right order."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            self.fail(f"{value!r} is no graph ({', '.join(GRAPHS)}); write SCHEDULE before --graph", param, ctx)
        return super().convert(value, param, ctx)


def graph_at(graph: str, name: Given, sizes: Mapping[str, int], costs: Costs, stage: int | None) -> Digraph:
    """A graph of `GRAPHS`: the dependencies of a schedule's cells, or a stage, by default the first with most nodes.

    Raises `DiagnosticError` for a schedule that is not legal, S404, and S608. Wrong usage: no such stage.
    """
    return _cells(name, sizes, costs, stage) if graph == CELLS else _dependencies(name, sizes, costs)


def _dependencies(name: Given, sizes: Mapping[str, int], costs: Costs) -> Digraph:
    from schedc.analysis.timeline import simulate
    from schedc.compiler import priced
    from schedc.inputs import open_input
    from schedc.interchange.dot import schedule_graph

    schedule, costs = priced(open_input(name), sizes, costs)
    return schedule_graph(schedule, simulate(schedule, costs))


def _cells(name: Given, sizes: Mapping[str, int], costs: Costs, stage: int | None) -> Digraph:
    from schedc.compiler import priced
    from schedc.draw.stage_graph import stage_graph
    from schedc.inputs import open_input
    from schedc.plan.price_cells import stage_graphs

    tree = open_input(name)
    schedule, costs = priced(tree, sizes, costs)
    shapes, times = stage_graphs(schedule, _with_blocks(tree, schedule, costs))
    if stage is None:
        stage = max(range(len(shapes)), key=lambda k: len(shapes[k]))
    if stage >= len(shapes):
        raise click.UsageError(f"{schedule.name} has no stage {stage}; it has 0 to {len(shapes) - 1}")
    alike = [k for k, shape in enumerate(shapes) if k != stage and shape == shapes[stage]]
    also = f", and of {_numbers(alike)} alike" if alike else ""
    return stage_graph(f"{schedule.name}: segments and exchanges of stage {stage}{also}", shapes[stage], times)


def _with_blocks(tree: Input, schedule: Schedule, costs: Costs) -> Costs:
    """Costs that know of cells; where no file says of which, standard blocks without times, and a note of it."""
    from schedc.load.library import Plan
    from schedc.plan.apply import layout_of_plan
    from schedc.plan.price_cells import standard_table, with_layout

    if costs.cell is not None:
        return costs
    table, what = standard_table(schedule), "one standard MoE block in every stage"
    if isinstance(tree, Plan):
        table, what = (
            with_layout(table, layout_of_plan(tree.tree, schedule)),
            "standard blocks as the plan lays them out",
        )
    click.echo(f"note: no --cost-file with a table [cell]: {what}, without times", err=True)
    return replace(costs, cell=table)


def _numbers(stages: Sequence[int]) -> str:
    """``1 to 4, 7``: ascending numbers, runs of three and more as a range."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and stage == runs[-1][-1] + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def write_graph(graph: Digraph, form: str, output: Path | None, width: int | None, asked: bool) -> None:
    """Writes a graph in a format of `pictures.FORMS_OF_GRAPHS`; without the program `dot` its source, to stdout.

    asked: whether a picture was asked for, by --format or -o: then it is wrong usage that there is none.
    """
    from schedc.draw.graph import drawn, has_dot

    if form == DOT:
        write(graph.source, output)
    elif has_dot():
        try:
            write(drawn(graph, form, width), output)
        except CalledProcessError as error:  # a build of graphviz without this format, say
            said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
            raise click.UsageError(f"dot cannot draw this graph as {form}: {(said or '').strip()}") from None
    else:
        write(graph.source, None)
        click.echo(f"note: the program `dot` is missing, so this is the graph's source; {_REMEDY}", err=True)
        if asked:
            sys.exit(USAGE)
