"""The inside of one cell as a self-contained SVG: its program above, the serial order below, on one time axis."""

from __future__ import annotations

from schedc.cell.graph import Lane
from schedc.cell.program import Half
from schedc.cell.simulate import StepSpan
from schedc.drawing import frame
from schedc.drawing.cell_chart import KINDS, CellChart, Panel, cell_hover, interval, labels, layer_of, node_name
from schedc.drawing.layout import MARGIN, tick_step
from schedc.drawing.markup import box, content, label, line, number, quantity, text_width
from schedc.drawing.palette import ink_of, shade_of
from schedc.drawing.style import document

_GUTTER = 76.0
_LANE, _GAP = 26.0, 5.0
_TEXT = 10.5
_WANTED = 58.0
"""px of a step of usual length, which give its name room."""
_NARROWEST, _WIDEST = 860.0, 6000.0
_HEAD = 44.0
"""px above a panel, for its name and the labels of tensors that leave the cell."""
_SWATCH = 15.0


def draw_cell_svg(chart: CellChart, width: float | None = None) -> str:
    """The text of the drawing; the same input gives the same bytes.

    width: px; by default, as many as the names need.
    """
    around = MARGIN + _GUTTER + MARGIN
    scale = _scale(chart) if width is None else (width - around) / (chart.makespan or 1.0)
    width = width or around + max(chart.makespan * scale, _NARROWEST)
    head, y = frame.header(chart.title, "", chart.facts, width)
    key, y = _legend(chart, y, width)
    parts = [*head, *key]
    for panel in chart.panels:
        top = y + _HEAD
        y = top + len(chart.lanes) * (_LANE + _GAP)
        parts += _axis(chart.makespan, scale, top - 4, y)
        parts += _panel(chart, panel, scale, top)
    parts += _ticks(chart.makespan, scale, y + 14)
    return document(parts, width, y + 14 + MARGIN, chart.title, ", ".join(chart.facts))


def _scale(chart: CellChart) -> float:
    """px per time unit that give names room in most boxes, unless the drawing gets too wide."""
    if chart.makespan <= 0:
        return 1.0
    return min(max(_WANTED / (chart.usual or chart.makespan), _NARROWEST / chart.makespan), _WIDEST / chart.makespan)


def _panel(chart: CellChart, panel: Panel, scale: float, top: float) -> list[str]:
    left = MARGIN + _GUTTER
    heading = f"{panel.name}: {quantity(panel.played.duration)}"
    parts = [label(MARGIN, top - 26, heading, "rank")]
    bottom = top + len(chart.lanes) * (_LANE + _GAP) - _GAP
    for row, lane in enumerate(chart.lanes):
        y = top + row * (_LANE + _GAP)
        parts.append(label(MARGIN, y + _LANE / 2 + 4, lane.value, "t"))
        parts += [_task(span, left, y, scale) for span in panel.spans(lane)]
        if lane is Lane.COMPUTE:
            parts += [_wait(span, left, y, scale) for span in panel.played.waits]
            parts += [_wait(span, left, y, scale, standing=True) for span in panel.played.standing]
    for row, (name, time) in enumerate(panel.marks):
        x, y = left + time * scale, top - 22 + 12 * row
        parts.append(line(x, y, x, bottom, "leaves"))
        parts.append(label(x - 5, y + 6, f"{name} {quantity(time)}", "tick end-of"))
    return parts


def _task(span: StepSpan, left: float, y: float, scale: float) -> str:
    x, width, layer = left + span.begin * scale, span.time * scale, layer_of(span)
    style = f"{KINDS[span.task.half].name}{shade_of(layer)}"
    parts = f"<title>{content(cell_hover(span))}</title>{box(x, y, width, _LANE, style)}"
    if span.task.half is Half.RECOMPUTE and width > 2:
        parts += box(x + 1, y + 1, width - 2, _LANE - 2, "paired")
    text = next((text for text in labels(span) if text_width(text, _TEXT) + 4 <= width), "")
    if text:
        size = number(_TEXT)
        parts += label(x + width / 2, y + _LANE / 2 + 4, text, f"n i{ink_of(shade_of(layer))}", font_size=size)
    return f'<g class="task">{parts}</g>'


def _wait(span: StepSpan, left: float, y: float, scale: float, standing: bool = False) -> str:
    """Draws time in which compute waits for an exchange: hatched, under a thick line while the exchange is carried."""
    x, width = left + span.begin * scale, span.time * scale
    what = "a fuller rank to start " if standing else ""
    title = content(f"compute waits for {what}{node_name(span)} ({span.task.lane}), {interval(span)}")
    parts = box(x, y, width, _LANE, "idle") + box(x, y + _LANE - 3, width, 3, "exposed") * (not standing)
    text = quantity(span.time)
    if text_width(text, _TEXT) + 4 <= width:
        parts += label(x + width / 2, y + _LANE / 2 + 3, text, "n", font_size=number(_TEXT))
    return f'<g class="wait"><title>{title}</title>{parts}</g>'


def _axis(makespan: float, scale: float, top: float, bottom: float) -> list[str]:
    left = MARGIN + _GUTTER
    return [line(left + time * scale, top, left + time * scale, bottom, "grid") for time in _times(makespan, scale)]


def _ticks(makespan: float, scale: float, y: float) -> list[str]:
    left = MARGIN + _GUTTER
    named = [label(left + time * scale, y, quantity(time), "tick") for time in _times(makespan, scale)]
    return [label(left - 12, y, "time", "tick end-of"), *named]


def _times(makespan: float, scale: float) -> list[float]:
    if makespan <= 0:
        return []
    step = tick_step(scale, 56)
    return [i * step for i in range(int(makespan / step + 1e-9) + 1)]


def _legend(chart: CellChart, top: float, width: float) -> tuple[list[str], float]:
    """The meaning of the fills, in as many rows as they need, and the top (px) of the next row."""
    halves = dict.fromkeys(span.task.half for span in chart.overlapped.played.spans)
    names = {Half.FORWARD: "forward", Half.RECOMPUTE: "forward once more", Half.BACKWARD: "input gradient",
             Half.WEIGHT: "weight gradient"}  # fmt: skip
    items = [_half_item(half, names[half]) for half in names if half in halves]
    items.append(frame.LegendItem(2 * _SWATCH, _wait_swatch, "compute waits for an exchange: exposed"))
    if chart.group:
        swatch = frame.LegendItem(2 * _SWATCH, _standing_swatch, "compute waits for a fuller rank to start one")
        items.append(swatch)
    if any(layer_of(span) for span in chart.overlapped.played.spans):
        items.append(frame.LegendItem(0, lambda x, y: "", "odd layers: deep shade"))
    parts, x = [], MARGIN
    for item in items:
        if x > MARGIN and x + item.width > width - MARGIN:
            x, top = MARGIN, top + 22
        parts.append(item.draw(x, top))
        x += item.width
    return parts, top + 22


def _half_item(half: Half, name: str) -> frame.LegendItem:
    style = f"{KINDS[half].name}0"
    edge = half is Half.RECOMPUTE

    def swatch(x: float, y: float) -> str:
        return box(x, y, _SWATCH, _SWATCH, style) + (box(x + 1, y + 1, _SWATCH - 2, _SWATCH - 2, "paired") * edge)

    return frame.LegendItem(_SWATCH, swatch, name)


def _wait_swatch(x: float, y: float) -> str:
    return box(x, y, 2 * _SWATCH, _SWATCH, "idle") + box(x, y + _SWATCH - 3, 2 * _SWATCH, 3, "exposed")


def _standing_swatch(x: float, y: float) -> str:
    return box(x, y, 2 * _SWATCH, _SWATCH, "idle")
