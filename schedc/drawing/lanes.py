"""The lanes of a drawing: an element per cell, idle gaps between cells, phases above and memory below."""

from __future__ import annotations

from pathlib import PurePath

import numpy as np

from schedc.drawing.cells import CellColumns, Curve
from schedc.drawing.layout import DrawingLayout
from schedc.drawing.markup import box, content, label, number, plain_markup, quantity, text_width
from schedc.drawing.palette import PHASES, ink_of, shade_of
from schedc.ir.ops import FACTS, LETTERS, OpKind
from schedc.source import NOWHERE

_NUMERAL, _SMALLEST = 12.0, 6.0
_PHASE_TEXT = 9.5
_INSET = 1.0
"""px, half the border of a pair. The border lies inside the cell, so that neighbouring pairs keep theirs."""


def lane(cells: CellColumns, rank: int, layout: DrawingLayout) -> list[str]:
    """The cells, idle gaps and phases of one rank."""
    parts = [_idle(start, end, layout, layout.cells_y(rank)) for start, end in cells.gaps(rank)]
    parts += _phases(cells, rank, layout)
    span = cells.of_rank(rank)
    parts += [_cell(cells, c, layout, layout.cells_y(rank)) for c in range(span.start, span.stop)]
    return parts


def _phases(cells: CellColumns, rank: int, layout: DrawingLayout) -> list[str]:
    """The strip over the cells that shows which phase of the source each cell is from, named where there is room."""
    parts = []
    y, height = layout.phases_y(rank), layout.rows.phases - 2
    for phase, start, end in cells.phase_runs(rank):
        if not (name := plain_markup(cells.phase_names[phase])):
            continue
        x, width = layout.x(start), (end - start) * layout.scale
        strip = box(x, y, max(width - 1, 0.5), height, f"p{phase % len(PHASES)}")
        parts.append(f'<g class="phase"><title>{content(f"phase {name}, {_interval(start, end)}")}</title>{strip}')
        if text_width(name, _PHASE_TEXT) + 6 <= width:
            parts.append(label(x + 4, y + height - 2.5, name, "phase-name"))
        parts.append("</g>")
    return parts


def memory(curve: Curve, top: float, rank: int, layout: DrawingLayout) -> list[str]:
    """The memory curve of one rank. top: memory at the full height, in the costs' unit, the same on every rank."""
    base, room = layout.memory_y(rank) + layout.rows.memory, layout.rows.memory - 5
    if not curve.held.size:
        return []
    points = curve.held * (room / top if top > 0 else 0.0)
    steps = [f"M{number(layout.x(float(curve.times[0])))} {number(base)}"]
    for time, height in zip(curve.times.tolist(), points.tolist(), strict=True):
        steps.append(f"H{number(layout.x(time))}V{number(base - height)}")
    path = "".join(steps)
    peak = int(np.argmax(curve.held))
    x, y = layout.x(float(curve.times[peak])), base - points[peak]
    dot = f'<circle cx="{number(x)}" cy="{number(y)}" r="2" class="dot"/>'
    return [f'<path d="{path}V{number(base)}Z" class="held"/>', f'<path d="{path}" class="curve"/>', dot]


def _interval(start: float, end: float) -> str:
    return f"{quantity(start)} to {quantity(end)}"


def _idle(start: float, end: float, layout: DrawingLayout, y: float) -> str:
    rect = box(layout.x(start), y, (end - start) * layout.scale, layout.rows.cells, "idle")
    title = content(f"idle {_interval(start, end)} ({quantity(end - start)})")
    return f'<g class="bubble"><title>{title}</title>{rect}</g>'


def _cell(cells: CellColumns, c: int, layout: DrawingLayout, y: float) -> str:
    start, middle, end = float(cells.start[c]), float(cells.middle[c]), float(cells.end[c])
    rows = [int(row) for row in (cells.first[c], cells.second[c]) if row >= 0]
    title = content(_hover(cells, rows, start, end))
    if len(rows) == 1:
        return f'<g class="cell"><title>{title}</title>{_op(cells, rows[0], start, end, layout, y)}</g>'
    parts = _op(cells, rows[0], start, middle, layout, y, before=2 * _INSET)
    parts += _op(cells, rows[1], middle, end, layout, y, after=2 * _INSET)
    width = max((end - start) * layout.scale - 2 * _INSET, 0.5)
    edge = box(layout.x(start) + _INSET, y + _INSET, width, layout.rows.cells - 2 * _INSET, "edge")
    return f'<g class="cell pair"><title>{title}</title>{parts}{edge}</g>'


def _op(
    cells: CellColumns,
    row: int,
    start: float,
    end: float,
    layout: DrawingLayout,
    y: float,
    before: float = 0.0,
    after: float = 0.0,
) -> str:
    """Fill and numeral of one op. before, after: px at its ends that a border takes from the numeral."""
    chunk = int(cells.chunk[row])
    left, right = layout.x(start), layout.x(end)
    rect = box(left, y, right - left, layout.rows.cells, f"{LETTERS[cells.schedule.kind[row]]}{shade_of(chunk)}")
    text = str(cells.schedule.microbatch[row])
    left, right = left + before, right - after
    size = min(_NUMERAL, np.floor(2 * (right - left - 2) / text_width(text, 1.0)) / 2)
    if size < _SMALLEST:
        return rect
    base = y + layout.rows.cells / 2 + 0.36 * size
    return rect + label((left + right) / 2, base, text, f"n i{ink_of(chunk)}", font_size=number(size))


def _hover(cells: CellColumns, rows: list[int], start: float, end: float) -> str:
    schedule = cells.schedule
    ops = []
    for row in rows:
        kind = OpKind(int(schedule.kind[row]))
        ops.append(
            f"{kind.name} {FACTS[kind].name}, stage {schedule.stage[row]}, microbatch {schedule.microbatch[row]}"
        )
    text = " & ".join(ops) + f"; rank {schedule.rank[rows[0]]}, {_interval(start, end)}"
    if phase := schedule.phases[schedule.phase[rows[0]]]:
        text += f"; phase {phase}"
    span = schedule.spans[schedule.span[rows[0]]]
    name = PurePath(schedule.source.name).name if schedule.source else schedule.name
    return text if span == NOWHERE else f"{text}; {name}:{span}"
