"""The inside of one cell as text: a line per lane of its program, and below it of the serial order."""

from __future__ import annotations

from itertools import groupby
from math import ceil
from textwrap import wrap

from schedc.cell.graph import Lane
from schedc.cell.simulate import StepSpan
from schedc.drawing import palette
from schedc.drawing.ansi import NORMAL, PLAIN, Style, StyledText, paint
from schedc.drawing.cell_chart import KINDS, CellChart, Panel, labels, layer_of
from schedc.drawing.layout import tick_step
from schedc.drawing.markup import quantity
from schedc.ir.ops import FACTS

_FAINT, _BOLD = Style(faint=True), Style(bold=True)
_NARROWEST = 20
_WANTED = 8
"""Columns of a step of usual length."""
_WAIT, _STANDING = "x", "."


def draw_cell_terminal(chart: CellChart, width: int, *, colours: int = PLAIN) -> str:
    """The two orders on one time axis, in lines of at most ``width`` characters (from 32).

    The axis is as long as the names need, and wraps. A column shows the step that runs in the middle of it. ``x`` means
    that compute waits for an exchange, ``.`` that it waits for a fuller rank to start one.
    """
    left = max(len(lane.value) for lane in chart.lanes) + 1
    columns = max(_NARROWEST, width - left)
    scale = max(columns / chart.makespan, _WANTED / (chart.usual or chart.makespan)) if chart.makespan > 0 else 0.0
    lines = [paint([StyledText(row, _BOLD)], colours) for row in wrap(chart.title, width)]
    lines += wrap(", ".join(chart.facts), width)
    for panel in chart.panels:
        marks = "".join(f", {name} {quantity(time)}" for name, time in panel.marks)
        lines += ["", *wrap(f"{panel.name}: {quantity(panel.played.duration)}{marks}", width)]
        whole = max(1, ceil(panel.played.duration * scale - 0.5))
        axis = _axis(whole, scale)
        rows = {lane: _row(panel, lane, whole, scale, colours) for lane in chart.lanes}
        for first in range(0, whole, columns):
            lines.append(
                paint([StyledText("time".ljust(left) + axis[first : first + columns], _FAINT)], colours).rstrip()
            )
            for lane, row in rows.items():
                shown = [StyledText(lane.value.ljust(left), _BOLD), *row[first : first + columns]]
                lines.append(paint(shown, colours).rstrip())
    return "\n".join([*lines, "", paint(_legend(chart, colours), colours)]) + "\n"


def _row(panel: Panel, lane: Lane, columns: int, scale: float, colours: int) -> list[StyledText]:
    """[columns] styled characters of one lane."""
    standing = {id(span) for span in panel.played.standing}
    spans = [*panel.spans(lane), *((*panel.played.waits, *panel.played.standing) if lane is Lane.COMPUTE else ())]
    drawn: list[StepSpan | None] = [None] * columns
    for span in spans:
        for column in range(max(0, round(span.begin * scale)), min(columns, round(span.end * scale))):
            drawn[column] = span
    texts: list[StyledText] = []
    for number, run in groupby(drawn, key=lambda span: -1 if span is None else id(span)):
        columns_of_span = list(run)
        count = len(columns_of_span)
        part = _part(columns_of_span[0], count, lane, colours) if number >= 0 else StyledText(" " * count)
        part = StyledText(_STANDING * count, _FAINT) if number in standing else part
        texts += [StyledText(character, part.style) for character in part.characters]
    return texts


def _part(span: StepSpan | None, width: int, lane: Lane, colours: int) -> StyledText:
    assert span is not None
    if span.task.lane is not lane:
        return StyledText(_WAIT * width, _FAINT)
    kind = KINDS[span.task.half]
    sign = "" if colours else kind.name
    text = next((sign + text for text in labels(span) if len(sign + text) < width), sign)
    if not colours:
        return StyledText(text.ljust(width - 1, "-")[: width - 1] + "|")
    shade = palette.shade_of(layer_of(span))
    return StyledText(text.ljust(width), Style(palette.INKS[shade], palette.FILLS[kind][shade]))


def _axis(columns: int, scale: float) -> str:
    row = [" "] * columns
    step = tick_step(scale, 10) if scale else 0.0
    for i in range(int(columns / (step * scale)) + 1 if step else 0):
        text, column = quantity(i * step), round(i * step * scale)
        if column + len(text) <= columns:
            row[column : column + len(text)] = text
    return "".join(row)


def _legend(chart: CellChart, colours: int) -> list[StyledText]:
    used = {KINDS[span.task.half] for span in chart.overlapped.played.spans}
    items: list[StyledText] = []
    for kind, fills in palette.FILLS.items():
        if kind in used:
            items += [StyledText("  ", Style(fill=fills[0]))] * bool(colours) + [
                StyledText(f" {kind.name} {FACTS[kind].name}  ")
            ]
    items += [StyledText(_WAIT, _FAINT), StyledText(" compute waits for an exchange", NORMAL)]
    if chart.group:
        items += [StyledText(f"  {_STANDING}", _FAINT), StyledText(" or for a fuller rank to start it", NORMAL)]
    return items
