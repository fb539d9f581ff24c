"""Lanes of large schedules: coloured strips, a few paths per rank instead of an element per cell."""

from __future__ import annotations

import numpy as np

from schedc.drawing.cells import CellColumns, Curve
from schedc.drawing.layout import DrawingLayout
from schedc.drawing.markup import box, content, number
from schedc.drawing.palette import PHASES, shade_of
from schedc.ir.arrays import Floats, Int64
from schedc.ir.ops import LETTERS

_TENTHS = 10
"""Steps per px of the memory curve."""


def note(cells: CellColumns, layout: DrawingLayout) -> str:
    """The footnote of a drawing of strips, which says what the drawing leaves out."""
    grain = cells.makespan / layout.detail.columns
    text = (
        f"{len(cells)} cells as strips: numerals and hover text left out, touching cells of one colour merged, "
        f"edges rounded to {grain:.2g} of time"
    )
    if layout.lanes == layout.ranks:
        return text
    return f"{layout.lanes} of {layout.ranks} ranks, one of every {layout.detail.every} and the last; {text}"


def lane_strip(cells: CellColumns, rank: int, layout: DrawingLayout) -> list[str]:
    """One rank: idle ground, a path per fill, a dark line along overlapped pairs, and a path per phase above.

    Edges are rounded to the grid of `columns`. Touching cells of one fill become one piece; a cell narrower than half a
    column can vanish between its neighbours.
    """
    y, height = layout.cells_y(rank), layout.rows.cells
    busy = cells.of_rank(rank)
    title = content(f"rank {rank}: {busy.stop - busy.start} cells")
    ground = box(layout.left, y, cells.makespan * layout.scale, height, "idle")
    fills = [_path(layout, y + height / 2, style, *edges) for style, edges in _layers(cells, busy, layout)]
    pairs = np.flatnonzero(cells.second[busy] >= 0) + busy.start
    paired = _on(cells.start[pairs], layout), _on(cells.end[pairs], layout)
    edge = [_path(layout, y + 1, "paired", *paired)] if pairs.size else []
    return [f'<g class="strip"><title>{title}</title>', ground, *fills, *edge, "</g>", *_phases(cells, rank, layout)]


def _layers(cells: CellColumns, busy: slice, layout: DrawingLayout) -> list[tuple[str, tuple[Int64, Int64]]]:
    """(style, (starts, ends)) of the layers to paint, in order: all busy time in its commonest fill, then the others.

    Edges between two px then blend with a neighbouring fill, not with the idle ground.
    """
    starts, ends, fills = _pieces(cells, busy, layout)
    kinds, counts = np.unique(fills, return_counts=True)
    layers: list[tuple[str, tuple[Int64, Int64]]] = []
    for i in np.argsort(-counts, kind="stable").tolist():
        chosen = fills == kinds[i] if layers else np.ones(fills.size, bool)
        layers.append((f"s{LETTERS[kinds[i] // 2]}{kinds[i] % 2}", (starts[chosen], ends[chosen])))
    return layers


def _phases(cells: CellColumns, rank: int, layout: DrawingLayout) -> list[str]:
    runs = cells.phase_runs(rank)
    phase = np.array([run[0] for run in runs], np.int64)
    starts, ends = (_on(np.array([run[i] for run in runs]), layout) for i in (1, 2))
    parts = []
    for p in np.unique(phase).tolist():
        if name := cells.phase_names[p]:
            path = _path(
                layout, layout.phases_y(rank) + 1.5, f"q{p % len(PHASES)}", starts[phase == p], ends[phase == p]
            )
            parts.append(f'<g class="phase"><title>{content(f"phase {name}")}</title>{path}</g>')
    return parts


def memory_strip(curve: Curve, makespan: float, highest: float, rank: int, layout: DrawingLayout) -> list[str]:
    """The memory of one rank, as one path of short relative moves.

    makespan: time units. highest: memory at the full height, in the costs' unit.
    """
    shown = coarse(curve, makespan, layout)
    if not shown.held.size:
        return []
    base, room = layout.memory_y(rank) + layout.rows.memory, layout.rows.memory - 5
    x = np.rint(shown.times * layout.scale * _TENTHS).astype(np.int64)
    y = np.rint(shown.held * (_TENTHS * room / highest if highest > 0 else 0.0)).astype(np.int64)
    along, up = np.diff(x, prepend=0), np.diff(y, prepend=0)
    steps = [
        (f"h{_tenths(dx)}" if dx else "") + (f"v{_tenths(-dy)}" if dy else "")
        for dx, dy in zip(along.tolist(), up.tolist(), strict=True)
    ]
    start = f"M{number(layout.left)} {number(base)}"
    dot = int(np.argmax(y))
    return [
        f'<path d="{start}{"".join(steps)}V{number(base)}" class="holding"/>',
        f'<circle cx="{number(layout.left + x[dot] / _TENTHS)}" cy="{number(base - y[dot] / _TENTHS)}" r="2" '
        'class="dot"/>',
    ]


def _tenths(value: int) -> str:
    """A number of tenths of a px in its shortest form in a path: ``-.3``, ``12``, ``4.5``."""
    sign, (whole, tenth) = "-" if value < 0 else "", divmod(abs(value), _TENTHS)
    return f"{sign}{whole or ('' if tenth else 0)}" + (f".{tenth}" if tenth else "")


def coarse(curve: Curve, makespan: float, layout: DrawingLayout) -> Curve:
    """The curve with one value per px or column of the grid, the highest within it: peaks stay.

    Equal neighbouring values are left out. makespan: time units.
    """
    if not curve.held.size or makespan <= 0:
        return curve
    count = min(int(layout.plot_width), layout.detail.columns)
    starts = np.arange(count) * (makespan / count)
    step = np.searchsorted(curve.times, starts, side="right") - 1
    highest = np.where(step >= 0, curve.held[step], 0.0)
    np.maximum.at(highest, np.minimum(curve.times * (count / makespan), count - 1).astype(np.int64), curve.held)
    changes = np.flatnonzero(np.diff(highest, prepend=0.0))
    return Curve(np.append(starts[changes], curve.times[-1]), np.append(highest[changes], curve.held[-1]))


def strokes(layout: DrawingLayout, y: float, style: str, start: Floats, end: Floats) -> str:
    """Horizontal strokes at height ``y`` px, at least a column of the grid each. start, end: [strokes] time units."""
    first = _on(start, layout)
    return _path(layout, y, style, first, np.maximum(_on(end, layout), first + 1))


def _on(times: Floats, layout: DrawingLayout) -> Int64:
    """[times] Columns of the grid that the times fall on."""
    return np.rint(times * (layout.scale * layout.detail.columns / layout.plot_width)).astype(np.int64)


def _pieces(cells: CellColumns, busy: slice, layout: DrawingLayout) -> tuple[Int64, Int64, Int64]:
    """[pieces] (start, end, fill) of the busy time on the grid, in order of time; fill is 2 * kind + shade."""
    both = np.stack([cells.first[busy], cells.second[busy]], 1)
    edges = np.stack([cells.start[busy], cells.middle[busy], cells.end[busy]], 1)
    there = both >= 0
    rows = both[there]
    shades = np.array([shade_of(c) for c in range(cells.schedule.placement.chunks)])
    fills = 2 * cells.schedule.kind[rows].astype(np.int64) + shades[cells.chunk[rows]]
    starts, ends = _on(edges[:, :2][there], layout), _on(edges[:, 1:][there], layout)
    wide = ends > starts
    return _merged(starts[wide], ends[wide], fills[wide])


def _merged(starts: Int64, ends: Int64, fills: Int64) -> tuple[Int64, Int64, Int64]:
    """Joins touching pieces of one fill."""
    if not starts.size:
        return starts, ends, fills
    new = np.append(True, (starts[1:] != ends[:-1]) | (fills[1:] != fills[:-1]))
    heads = np.flatnonzero(new)
    return starts[heads], ends[np.append(heads[1:], starts.size) - 1], fills[heads]


def _path(layout: DrawingLayout, y: float, style: str, starts: Int64, ends: Int64) -> str:
    """Horizontal strokes at height ``y`` px, one unit of the path per column. Relative moves keep the path short."""
    wide = ends > starts
    starts, ends, _ = _merged(starts[wide], ends[wide], np.zeros(int(wide.sum()), np.int64))
    moves = np.diff(starts, prepend=0)
    moves[1:] -= (ends - starts)[:-1]
    strokes = [f"m{move} 0h{length}" for move, length in zip(moves.tolist(), (ends - starts).tolist(), strict=True)]
    place = f"translate({number(layout.left)} {number(y)}) scale({layout.plot_width / layout.detail.columns:.6g} 1)"
    return f'<path transform="{place}" class="{style}" d="{"".join(strokes)}"/>'
