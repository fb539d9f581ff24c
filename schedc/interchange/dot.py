"""Draws the dependency graph of a small schedule with graphviz, and marks the critical path.

A node is an op, or the two ops of an overlapped pair. A dashed edge is the order of a rank, a solid edge a value that
one op computes and another uses.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from graphviz import Digraph

from schedc.drawing.graph import CRITICAL, ORDER, VALUE, graph_text, lines, new_graph, refuse_large
from schedc.drawing.markup import quantity
from schedc.drawing.palette import FILLS, LIGHT
from schedc.ir.arrays import Int32
from schedc.ir.schedule import Schedule
from schedc.step.bubbles import critical_path
from schedc.step.costs.costs import Costs
from schedc.step.timeline import Timeline, simulate
from schedc.step.work_runs import WorkRuns
from schedc.units import equations


def export(schedule: Schedule, costs: Costs, works: WorkRuns | None = None) -> str:
    """The target ``dot``: the source of `schedule_graph`, at the times that works leave."""
    timeline = simulate(schedule, costs) if works is None else works.timeline(float(costs.p2p))
    return str(schedule_graph(schedule, timeline).source)


def schedule_graph(schedule: Schedule, timeline: Timeline) -> Digraph:
    """The graph, a cluster per rank. Raises `DiagnosticError` (S608) for more cells than `MOST_NODES`."""
    remedy = "choose smaller sizes with -D, or look at `schedc show --format html`, which shows the critical path too"
    refuse_large(len(timeline.dependencies), remedy, schedule.source)
    path = {cell: int(timeline.bound_by[cell]) for cell in critical_path(timeline).tolist()}
    named = f"{schedule.name} ({equations(schedule.sizes)})" if schedule.sizes else schedule.name
    graph = new_graph("schedule", [f"{named}, makespan {quantity(timeline.makespan)}"])
    for rank in range(schedule.ranks):
        with graph.subgraph(name=f"cluster_{rank}") as cluster:
            cluster.attr(label=f"rank {rank}", color=LIGHT.hatch)
            low, high = timeline.dependencies.rank_start[rank : rank + 2].tolist()
            for cell in range(low, high):
                cluster.node(f"c{cell}", **_node(schedule, timeline, cell), **(CRITICAL if cell in path else {}))
    for before, cell, style in _edges(timeline):
        graph.edge(f"c{before}", f"c{cell}", **(CRITICAL if path.get(cell) == before else style))
    return graph


def _node(schedule: Schedule, timeline: Timeline, cell: int) -> dict[str, str]:
    """Attributes of a node: its ops above its times, in the pale shades of the drawings; a pair has two shades."""
    rows = timeline.dependencies.first[cell], timeline.dependencies.second[cell]
    ops = [schedule.op(int(row)) for row in rows if row >= 0]
    when = f"{quantity(float(timeline.start[cell]))} – {quantity(float(timeline.end[cell]))}"
    words = " & ".join(map(str, ops))
    fill = ";0.5:".join(FILLS[op.kind][0] for op in ops)
    return {"label": lines([words, when], "n"), "tooltip": graph_text(f"{words}, {when}"), "fillcolor": fill}


def _edges(timeline: Timeline) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Edges (before, after, style): order of ranks, then values. If both join two nodes, only the value is drawn."""
    dependencies = timeline.dependencies
    values = {(int(producer), int(consumer)) for consumer, producer in _pairs(dependencies.producers)}
    order = {(int(before), cell) for cell, before in enumerate(dependencies.previous.tolist()) if before >= 0}
    for style, edges in ((ORDER, order - values), (VALUE, values)):
        yield from ((*edge, style) for edge in sorted(edges))


def _pairs(producers: Int32) -> list[tuple[int, int]]:
    """Pairs (consumer, producer) of cells. producers: [2, cells]."""
    row, consumer = np.nonzero(producers >= 0)
    return list(zip(consumer.tolist(), producers[row, consumer].tolist(), strict=True))
