"""What runs beside a rank in a drawing: a strip per lane that it uses, and hatching where the rank stands at a JOIN."""

from __future__ import annotations

import numpy as np

from schedc.drawing.beside import JOINED, LANES, Beside
from schedc.drawing.layout import DrawingLayout
from schedc.drawing.markup import box, content, label, number, quantity, text_width
from schedc.drawing.strips import strokes

_NUMERAL, _SMALLEST = 9.0, 6.0


def lanes(beside: Beside, rank: int, layout: DrawingLayout) -> list[str]:
    """An element per work and copy in the strips of a rank, and one per time that the rank stands at a JOIN."""
    parts = [_stand(beside, row, layout, begin, end) for row, begin, end in beside.waits(rank)]
    for place, lane in enumerate(beside.lanes_of(rank)):
        parts.append(_name(rank, place, lane, layout))
        parts += [_row(beside, row, place, layout) for row in beside.on(rank, lane).tolist()]
    return parts


def lanes_as_strips(beside: Beside, rank: int, layout: DrawingLayout) -> list[str]:
    """The same in a few paths: one per lane, and one for the times at JOINs."""
    parts = []
    waits = list(beside.waits(rank))
    if waits:
        begin, end = (np.array([wait[i] for wait in waits]) for i in (1, 2))
        y = layout.cells_y(rank) + layout.rows.cells / 2
        parts.append(strokes(layout, y, "standing", begin, end))
    for place, lane in enumerate(beside.lanes_of(rank)):
        rows = beside.on(rank, lane)
        y = layout.works_y(rank, place) + layout.rows.works / 2
        path = strokes(layout, y, LANES[lane], beside.begin[rows], beside.finish[rows])
        count = f"{rows.size} {'works' if beside.kind[rows[0]] < JOINED else 'exchanges of copies'}"
        title = content(f"rank {rank}, lane {LANES[lane]}: {count}")
        parts += [_name(rank, place, lane, layout), f'<g class="lane"><title>{title}</title>{path}</g>']
    return parts


def _name(rank: int, place: int, lane: int, layout: DrawingLayout) -> str:
    y = layout.works_y(rank, place) + layout.rows.works / 2 + 3
    return label(layout.left - 6, y, LANES[lane], "lane-name")


def _row(beside: Beside, row: int, place: int, layout: DrawingLayout) -> str:
    begin, finish, rank = float(beside.begin[row]), float(beside.finish[row]), int(beside.rank[row])
    y, height, width = layout.works_y(rank, place), layout.rows.works, (finish - begin) * layout.scale
    title = content("; ".join([*beside.hover(row), f"rank {rank}"]))
    rect = box(layout.x(begin), y + 1, max(width, 0.5), height - 1, LANES[beside.lane[row]])
    text = beside.numeral(row)
    size = min(_NUMERAL, np.floor(2 * (width - 2) / text_width(text, 1.0)) / 2)
    if size >= _SMALLEST:
        middle = layout.x((begin + finish) / 2)
        rect += label(middle, y + (height + 1) / 2 + 0.36 * size, text, "n i0", font_size=number(size))
    return f'<g class="{"work" if beside.kind[row] < JOINED else "copy"}"><title>{title}</title>{rect}</g>'


def _stand(beside: Beside, row: int, layout: DrawingLayout, begin: float, end: float) -> str:
    y = layout.cells_y(int(beside.rank[row]))
    rect = box(layout.x(begin), y, (end - begin) * layout.scale, layout.rows.cells, "stands")
    when = f"{quantity(begin)} to {quantity(end)} ({quantity(end - begin)})"
    title = content(f"stands at the JOIN of {beside.name(row)}, {when}")
    return f'<g class="stand"><title>{title}</title>{rect}</g>'
