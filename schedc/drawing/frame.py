"""The parts of a drawing around its lanes: title, figures, legend, time axis, and names of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from schedc.drawing import palette
from schedc.drawing.beside import LANES, Beside
from schedc.drawing.cells import CellColumns
from schedc.drawing.layout import GUTTER, MARGIN, WIDEST_GUTTER, DrawingLayout, tick_step
from schedc.drawing.markup import box, fit_text_width, label, line, number, plain_markup, quantity, text_width
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import FACTS, OpKind

_SIZE = 12.0
_ROW = 22.0
_SWATCH = 15.0
_MOST_PHASES = 24
_LANE_NAME = 24
"""px that the name of a lane of works takes."""
_FEW_LANES = 4
"""Lanes up to which a drawing needs no second time axis below them."""


@dataclass(frozen=True)
class LegendItem:
    """An entry of the legend: a swatch and its meaning.

    swatch_width: px. swatch: draws the swatch at the (x, y) of its corner, in px.
    """

    swatch_width: float
    swatch: Callable[[float, float], str]
    text: str

    @property
    def width(self) -> float:
        return self.swatch_width + 6 + text_width(self.text, _SIZE) + 18

    def draw(self, x: float, y: float) -> str:
        return self.swatch(x, y) + label(x + self.swatch_width + 6, y + 12, self.text, "t")


def header(title: str, doc: str, facts: list[str], width: float) -> tuple[list[str], float]:
    """Title, first sentence of the documentation and the figures, and the y (px) of the next row."""
    room = width - 2 * MARGIN
    parts = [label(MARGIN, MARGIN + 14, fit_text_width(plain_markup(title), 18, room), "title")]
    y = MARGIN + 36
    for text, style in [(doc, "t muted"), *((row, "t") for row in _rows_of(facts, room))]:
        if text:
            parts.append(label(MARGIN, y, fit_text_width(plain_markup(text), _SIZE, room), style))
            y += 20
    return parts, y


def _rows_of(texts: list[str], room: float, joint: str = " · ") -> list[str]:
    """Joins the texts in as many rows as they need."""
    rows = [texts[0]]
    for text in texts[1:]:
        joined = f"{rows[-1]}{joint}{text}"
        if text_width(joined, _SIZE) <= room:
            rows[-1] = joined
        else:
            rows.append(text)
    return rows


def legend(cells: CellColumns, held: str, strips: bool, top: float, width: float) -> tuple[list[str], float]:
    """The meaning of every fill, ink and tint in use, in as many rows as they need, and the y (px) of the next row."""
    parts: list[str] = []
    for items in (_marks(cells, held, strips), _lane_marks(cells.beside, strips), _phase_marks(cells)):
        x = MARGIN
        for item in items:
            if x > MARGIN and x + item.width > width - MARGIN:
                x, top = MARGIN, top + _ROW
            parts.append(item.draw(x, top))
            x += item.width
        top += _ROW if items else 0
    return parts, top


def axis(cells: CellColumns, layout: DrawingLayout) -> list[str]:
    """Lines behind the lanes at round times, and their figures above the lanes; below, too, if there are many."""
    step = tick_step(layout.scale, 56)
    parts = []
    rows = [layout.top - 8] + ([layout.bottom + 18] if layout.lanes > _FEW_LANES else [])
    for i in range(int(cells.makespan / step + 1e-9) + 1):
        x = layout.x(i * step)
        parts.append(line(x, layout.top - 4, x, layout.bottom + 4, "grid"))
        parts += [label(x, y, quantity(i * step), "tick") for y in rows]
    x = layout.x(cells.makespan)
    parts.append(line(x, layout.top - 4, x, layout.bottom + 4, "end"))
    parts += [label(layout.left - 12, y, "time", "tick end-of") for y in rows]
    return parts


def _marks(cells: CellColumns, held: str, strips: bool) -> list[LegendItem]:
    schedule = cells.schedule
    chunks = min(schedule.placement.chunks, len(palette.INKS))
    shades = min(chunks, 2)
    used = set(np.unique(schedule.kind).tolist())
    items = [
        LegendItem(2 * _SWATCH if k is OpKind.B else _SWATCH, _fills(k, shades), f"{k.name}  {FACTS[k].name}")
        for k in FACTS
        if k in used
    ]
    if (schedule.pair >= 0).any():
        pair = (OpKind.F, OpKind.B if OpKind.B in used else OpKind.I)
        halves = schedule.kind[schedule.pair >= 0]
        if not BACKWARD[halves[1::2]].any():  # pairs with weight gradients alone
            pair = OpKind(int(halves[0])), OpKind(int(halves[1]))
        text = "overlapped (edge above)" if strips else "overlapped pair"
        items.append(LegendItem(3 * _SWATCH, _pair(pair, shades, strips), text))
    items.append(LegendItem(2 * _SWATCH, lambda x, y: _patch(x, y, 2 * _SWATCH, "idle"), "idle"))
    items.append(LegendItem(2 * _SWATCH, _curve, held))
    if strips:
        return items + [_shade_item(shade, cells) for shade in range(shades) if shades > 1]
    return items + [_ink_item(ink, cells) for ink in range(chunks)]


def _names(count: int, first: int, period: int) -> str:
    """Names every ``period``-th of ``count`` chunks: ``chunk 0``, ``chunks 0, 4``, ``chunks 0, 4, 8, …``."""
    numbers = list(range(first, count, period))
    if len(numbers) == 1:
        return f"chunk {numbers[0]}"
    return "chunks " + ", ".join(map(str, numbers[:3])) + (", …" if len(numbers) > 3 else "")


def _ink_item(ink: int, cells: CellColumns) -> LegendItem:
    names = _names(cells.schedule.placement.chunks, ink, len(palette.INKS))

    def swatch(x: float, y: float) -> str:
        numeral = label(x + _SWATCH / 2, y + 11.5, "m", f"n i{ink}", font_size="11")
        return _patch(x, y, _SWATCH, f"F{palette.shade_of(ink)}") + numeral

    pipes = cells.schedule.placement.pipe_of_chunk[:, ink :: len(palette.INKS)]
    if cells.schedule.placement.pipes > 1 and (pipes == pipes[0, 0]).all():
        names += f" (pipe {pipes[0, 0]})"
    return LegendItem(_SWATCH, swatch, f"microbatch of {names}" if ink == 0 else names)


def _shade_item(shade: int, cells: CellColumns) -> LegendItem:
    names = _names(cells.schedule.placement.chunks, shade, 2)
    return LegendItem(_SWATCH, lambda x, y: _patch(x, y, _SWATCH, f"F{shade}"), names)


def _phase_marks(cells: CellColumns) -> list[LegendItem]:
    used = [p for p in np.unique(cells.phase).tolist() if cells.phase_names[p]]
    items = [
        LegendItem(_SWATCH, _tint(p), fit_text_width(plain_markup(cells.phase_names[p]), _SIZE, 160))
        for p in used[:_MOST_PHASES]
    ]
    if len(used) > _MOST_PHASES:
        items.append(LegendItem(0, lambda x, y: "", f"and {len(used) - _MOST_PHASES} more phases"))
    return items


def _lane_marks(beside: Beside | None, strips: bool) -> list[LegendItem]:
    if beside is None or not len(beside):
        return []
    items = [LegendItem(_SWATCH, _lane_patch(lane), text) for lane, text in beside.legend()]
    if not beside.stands:
        return items
    stands: Callable[[float, float], str] = lambda x, y: _patch(x, y, 2 * _SWATCH, "stands")  # noqa: E731
    if strips:
        stands = lambda x, y: line(x, y + 8, x + 2 * _SWATCH, y + 8, "standing")  # noqa: E731
    return [*items, LegendItem(2 * _SWATCH, stands, "exposed: the rank stands at a JOIN")]


def _lane_patch(lane: int) -> Callable[[float, float], str]:
    return lambda x, y: box(x, y + 2, _SWATCH, 10, LANES[lane])


def _patch(x: float, y: float, width: float, style: str) -> str:
    return box(x, y, width, _SWATCH, style)


def _fills(kind: OpKind, shades: int) -> Callable[[float, float], str]:
    width = _SWATCH * (2 if kind is OpKind.B else 1) / shades
    return lambda x, y: "".join(_patch(x + i * width, y, width, f"{kind.name}{i}") for i in range(shades))


def _pair(pair: tuple[OpKind, OpKind], shades: int, strips: bool) -> Callable[[float, float], str]:
    first, second = pair

    def swatch(x: float, y: float) -> str:
        fills = _patch(x, y, _SWATCH, f"{first.name}0")
        fills += _patch(x + _SWATCH, y, 2 * _SWATCH, f"{second.name}{shades - 1}")
        edge = line(x, y + 1, x + 3 * _SWATCH, y + 1, "edge") if strips else _patch(x, y, 3 * _SWATCH, "edge")
        return fills + edge

    return swatch


def _curve(x: float, y: float) -> str:
    steps = f"M{number(x)} {number(y + 14)}h6v-7h9v-6h9v9h6"
    return f'<path d="{steps}" class="curve"/>'


def _tint(phase: int) -> Callable[[float, float], str]:
    return lambda x, y: box(x, y + 3, _SWATCH, 9, f"p{phase % len(palette.PHASES)}")


def stage_texts(cells: CellColumns) -> list[str]:
    """[ranks] The stages of each rank: ``stages 0, 7``."""
    table = cells.schedule.placement.stage_of_chunk
    held = [[stage for stage in row if stage >= 0] for row in table.tolist()]
    return [("stage " if len(row) == 1 else "stages ") + ", ".join(map(str, row)) for row in held]


def gutter_width(texts: list[str], works: bool = False) -> float:
    """px that the names left of the lanes take. works: whether names of lanes of works stand beside them."""
    room = 10 + (_LANE_NAME if works else 0)
    return float(np.clip(max(text_width(text, 10) for text in texts) + room, GUTTER, WIDEST_GUTTER))


def gutter(cells: CellColumns, layout: DrawingLayout, stages: list[str], peaks: list[str]) -> list[str]:
    """The rank and its stages left of each lane, and the peak right of its curve."""
    parts = []
    for rank in layout.shown:
        middle = layout.cells_y(rank) + layout.rows.cells / 2
        parts.append(label(MARGIN, middle + 4, f"rank {rank}", "rank"))
        if not layout.detail.strips:
            parts.append(
                label(MARGIN, middle + 24, fit_text_width(stages[rank], 10, layout.left - MARGIN - 8), "tick left")
            )
        base = layout.memory_y(rank) + layout.rows.memory
        parts.append(label(layout.x(cells.makespan) + 8, base - 4, peaks[rank], "peak"))
    return parts


def footer(layout: DrawingLayout, note: str, width: float) -> tuple[list[str], float]:
    """A note about the drawing itself, if any, in as many rows as it needs, and the height (px) of the drawing."""
    bottom = layout.bottom + (28 if layout.lanes > _FEW_LANES else 8)
    rows = _rows_of(note.split(), width - 2 * MARGIN, " ") if note else []
    parts = [label(MARGIN, bottom + 14 + 18 * i, row, "t muted") for i, row in enumerate(rows)]
    return parts, bottom + MARGIN / 2 + (2 + 18 * len(rows) if rows else 0)
