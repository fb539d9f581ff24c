"""The dependency graph of a small schedule as graphviz text, the critical path marked.

A node is a cell: an op, or the two ops of an overlapped pair. A dashed edge is the order of a rank, a solid one a
value that is handed over. The language: graphviz.org, "DOT Language".
"""

from __future__ import annotations

import json

import numpy as np

from schedc.analysis.bubbles import critical_path
from schedc.analysis.timeline import Timeline
from schedc.draw.palette import FILLS
from schedc.emit.targets import cannot
from schedc.ir.schedule import Int32, Schedule

MOST_CELLS = 600
"""Cells of the largest graph: dot itself takes minutes above it, and nobody reads the picture."""

_CRITICAL = 'color="#cc0000", penwidth=2.5'


def to_dot(schedule: Schedule, timeline: Timeline) -> str:
    """The graph; ends with a newline. Raises `DiagnosticError` (S608) for more cells than a picture can show."""
    cells = len(timeline.dependencies)
    if cells > MOST_CELLS:
        raise cannot(
            "S608",
            f"a graph of {cells} cells is too large to be drawn",
            f"graphviz lays out some {MOST_CELLS} in reasonable time",
            "choose smaller sizes with -D, or look at `schedc show --format html`, which shows the critical path too",
            schedule.source,
        )
    path = {cell: int(timeline.bound_by[cell]) for cell in critical_path(timeline).tolist()}
    title = json.dumps(f"{schedule.name}: {', '.join(f'{name} = {value}' for name, value in schedule.sizes.items())}")
    lines = [
        "digraph schedule {",
        f"  label={title}; labelloc=t; rankdir=LR; newrank=true; fontname=Helvetica;",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=11, margin="0.08,0.04"];',
        "  edge [arrowsize=0.6];",
    ]
    for rank in range(schedule.ranks):
        lines.append(f'  subgraph cluster_{rank} {{ label="rank {rank}"; color="#bbbbbb";')
        low, high = timeline.dependencies.rank_start[rank : rank + 2]
        lines += [f"    {_node(schedule, timeline, cell, cell in path)}" for cell in range(low, high)]
        lines.append("  }")
    return "\n".join([*lines, *_edges(timeline, path), "}", ""])


def _node(schedule: Schedule, timeline: Timeline, cell: int, critical: bool) -> str:
    known = timeline.dependencies
    first, second = int(known.first[cell]), int(known.second[cell])
    text = str(schedule.op(first)) if second < 0 else f"{schedule.op(first)} & {schedule.op(second)}"
    # The pale shades of the drawings; a pair is half forward, half backward there and here.
    fill = ":".join(FILLS[schedule.op(row).kind][0] for row in (first, second) if row >= 0)
    when = f"{timeline.start[cell]:g} – {timeline.end[cell]:g}"
    mark = f", {_CRITICAL}" if critical else ""
    return f'c{cell} [label="{text}", tooltip="{when}", fillcolor="{fill}"{mark}];'


def _edges(timeline: Timeline, path: dict[int, int]) -> list[str]:
    """Order of the ranks, then values handed over; where one goes the way of another only the value is drawn."""
    known = timeline.dependencies
    values = {(int(made), int(taken)) for taken, made in _pairs(known.producers)}
    order = {(int(before), cell) for cell, before in enumerate(known.previous.tolist()) if before >= 0}
    found = []
    for style, edges in (("style=dashed, color=gray", order - values), ("color=black", values)):
        for made, taken in sorted(edges):
            found.append(f"  c{made} -> c{taken} [{_CRITICAL if path.get(taken) == made else style}];")
    return found


def _pairs(producers: Int32) -> list[tuple[int, int]]:
    row, taken = np.nonzero(producers >= 0)
    return list(zip(taken.tolist(), producers[row, taken].tolist(), strict=True))
