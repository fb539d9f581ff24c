"""Graphs that `show --graph` writes: as pictures that the program `dot` lays out, or as their source."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING

import click

from schedc.cli.common import USAGE, write
from schedc.cli.pictures import DOT
from schedc.cli.screen import write_note

if TYPE_CHECKING:
    from graphviz import Digraph

    from schedc.load.library import Given
    from schedc.step.costs.costs import Costs

DEPENDENCIES, CELLS = "dependencies", "cells"
GRAPHS = (DEPENDENCIES, CELLS)

_REMEDY = "install graphviz (apt-get install graphviz, brew install graphviz)"


class GraphName(click.Choice[str]):
    """The name of a graph. If SCHEDULE follows ``--graph`` in its place, the error message gives the right order."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            self.fail(f"{value!r} is no graph ({', '.join(GRAPHS)}); write SCHEDULE before --graph", param, ctx)
        return super().convert(value, param, ctx)


def graph_at(graph: str, name: Given, sizes: Mapping[str, int], costs: Costs, stage: int | None) -> Digraph:
    """A graph of `GRAPHS`: the dependencies of a schedule's cells, or a stage, by default the first with most nodes.

    Raises `DiagnosticError` for a schedule that is not legal, S404, and S608. Raises `click.UsageError` for a stage
    that does not exist.
    """
    from schedc.report.graphs import dependency_graph, graph_stages_at

    if graph == DEPENDENCIES:
        return dependency_graph(name, sizes, costs)
    stages = graph_stages_at(name, sizes, costs)
    if stages.assumed:
        write_note(f"note: no --cost-file with a table [cell]: {stages.assumed}, without times")
    if stage is None:
        stage = stages.largest
    if stage >= len(stages.shapes):
        raise click.UsageError(f"{stages.name} has no stage {stage}; it has 0 to {len(stages.shapes) - 1}")
    return stages.draw(stage)


def write_graph(graph: Digraph, form: str, output: Path | None, width: int | None, asked: bool) -> None:
    """Writes a graph in a format of `pictures.FORMS_OF_GRAPHS`; without the program `dot` its source, to stdout.

    asked: whether --format or -o asked for a picture. Then a missing `dot` is wrong usage.
    """
    from schedc.drawing.graph import drawn, has_dot

    if form == DOT:
        write(graph.source, output)
    elif has_dot():
        try:
            write(drawn(graph, form, width), output)
        except CalledProcessError as error:  # for example a build of graphviz without this format
            answer = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
            raise click.UsageError(f"dot cannot draw this graph as {form}: {(answer or '').strip()}") from None
    else:
        write(graph.source, None)
        write_note(f"note: the program `dot` is missing, so this is the graph's source; {_REMEDY}")
        if asked:
            sys.exit(USAGE)
