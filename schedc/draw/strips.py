"""Lanes of large schedules: coloured strips, a few paths per rank instead of an element per cell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedc.draw.cells import Cells, Curve, Floats
from schedc.draw.layout import Layout
from schedc.draw.markup import box, content, number
from schedc.draw.palette import shade_of
from schedc.ir.ops import LETTERS

Ints = npt.NDArray[np.int64]

_PIECES, _FINEST, _COARSEST = 160_000, 9600, 600


def columns(layout: Layout) -> int:
    """Columns of the grid that edges are put on: fewer for more ranks, so that the text stays below about 2 MB."""
    return int(np.clip(_PIECES // max(layout.ranks, 1), _COARSEST, _FINEST))


def strip_lane(cells: Cells, rank: int, layout: Layout) -> list[str]:
    """One rank: idle ground, a path per fill, and a dark line along overlapped pairs.

    Edges are rounded to the grid of `columns`; touching cells of one fill become one piece, and a cell narrower
    than half a column can vanish in its neighbours.
    """
    y, height = layout.cells_y(rank), layout.rows.cells
    busy = cells.of_rank(rank)
    step = layout.plot_width / columns(layout)
    grid = layout.scale / step
    starts, ends, fills = _pieces(cells, busy, grid)
    title = content(f"rank {rank}: {busy.stop - busy.start} cells")
    ground = box(layout.left, y, cells.makespan * layout.scale, height, "idle")
    parts = [f'<g class="strip"><title>{title}</title>{ground}']
    place = f'transform="translate({number(layout.left)} {{y}}) scale({step:.6g} 1)"'
    # All that is busy gets the commonest fill first and the others over it: edges that fall between two
    # pixels then blend with a neighbour and never let the idle ground through.
    kinds, counts = np.unique(fills, return_counts=True)
    for fill in kinds[np.argsort(-counts, kind="stable")].tolist():
        name = f"{LETTERS[fill // 2]}{fill % 2}"
        chosen = slice(None) if fill == kinds[counts.argmax()] else fills == fill
        path = _runs(starts[chosen], ends[chosen])
        parts.append(f'<path {place.format(y=number(y + height / 2))} class="s{name}" d="{path}"/>')
    paired = np.flatnonzero(cells.second[busy] >= 0) + busy.start
    if paired.size:
        path = _runs(_on(cells.start[paired], grid), _on(cells.end[paired], grid))
        parts.append(f'<path {place.format(y=number(y + 1))} class="paired" d="{path}"/>')
    parts.append("</g>")
    return parts


def coarse(curve: Curve, makespan: float, layout: Layout) -> Curve:
    """The curve with one value per px, the highest within it, and only where that changes; peaks stay."""
    if not curve.held.size or makespan <= 0:
        return curve
    count = int(layout.plot_width)
    starts = np.arange(count) * (makespan / count)
    known = np.searchsorted(curve.times, starts, side="right") - 1
    highest = np.where(known >= 0, curve.held[known], 0.0)
    np.maximum.at(highest, np.minimum(curve.times * (count / makespan), count - 1).astype(np.int64), curve.held)
    changes = np.flatnonzero(np.diff(highest, prepend=0.0))
    return Curve(np.append(starts[changes], curve.times[-1]), np.append(highest[changes], curve.held[-1]))


def _on(times: Floats, grid: float) -> Ints:
    return np.rint(times * grid).astype(np.int64)


def _pieces(cells: Cells, busy: slice, grid: float) -> tuple[Ints, Ints, Ints]:
    """(start, end, fill) of what is to be painted, on the grid and in order of time; fill is 2 * kind + shade."""
    first, second = cells.first[busy], cells.second[busy]
    both = np.stack([first, second], 1)
    edges = np.stack([cells.start[busy], cells.middle[busy], cells.end[busy]], 1)
    there = both >= 0
    rows = both[there]
    fills = 2 * cells.schedule.kind[rows].astype(np.int64) + shade_of_all(cells.chunk[rows])
    starts, ends = _on(edges[:, :2][there], grid), _on(edges[:, 1:][there], grid)
    wide = ends > starts
    return _merged(starts[wide], ends[wide], fills[wide])


def shade_of_all(chunks: npt.NDArray[np.int32]) -> Ints:
    """`palette.shade_of`, elementwise."""
    return np.asarray([shade_of(c) for c in range(int(chunks.max(initial=0)) + 1)], np.int64)[chunks]


def _merged(starts: Ints, ends: Ints, fills: Ints) -> tuple[Ints, Ints, Ints]:
    """The same pieces with touching ones of one fill joined."""
    if not starts.size:
        return starts, ends, fills
    new = np.append(True, (starts[1:] != ends[:-1]) | (fills[1:] != fills[:-1]))
    heads = np.flatnonzero(new)
    return starts[heads], ends[np.append(heads[1:], starts.size) - 1], fills[heads]


def _runs(starts: Ints, ends: Ints) -> str:
    """A path of horizontal strokes; moves are relative, for they are short."""
    starts, ends, _ = _merged(starts, ends, np.zeros(starts.size, np.int64))
    gaps = starts[1:] - ends[:-1]
    lengths = ends - starts
    if not starts.size:
        return ""
    tail = [f"m{gap} 0h{length}" for gap, length in zip(gaps.tolist(), lengths[1:].tolist(), strict=True)]
    return f"M{starts[0]} 0h{lengths[0]}" + "".join(tail)
