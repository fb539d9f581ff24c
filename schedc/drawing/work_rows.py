"""Works and copies of a rank in the terminal: a line per lane that the rank uses, under the line of the rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from schedc.drawing import palette
from schedc.drawing.ansi import Style, StyledText
from schedc.drawing.beside import LANES, Beside
from schedc.drawing.chart import Chart

_INDENT = "  "
_MOVES = "="
"""What a work is drawn with where there is no colour."""


@dataclass(frozen=True)
class CharacterGrid:
    """Columns of the common time axis, columns per time unit, and whether figures stand right of the axis."""

    columns: int
    scale: float
    figures: bool


def lane_rows(
    beside: Beside | None, rank: int, grid: CharacterGrid, left: int, colours: int
) -> Iterator[list[StyledText]]:
    """A line per lane. left: characters that names take. colours: as for `schedc.drawing.terminal.draw_terminal`."""
    for lane in beside.lanes_of(rank) if beside is not None else ():
        name = StyledText(f"{_INDENT}{LANES[lane]}".ljust(left)[:left], Style(faint=True))
        yield [name, *_runs(beside, rank, lane, grid, colours)] if beside is not None else []


def _runs(beside: Beside, rank: int, lane: int, grid: CharacterGrid, colours: int) -> Iterator[StyledText]:
    """The rows of a lane between blanks, each at least one column wide, with the microbatch where it fits."""
    rows = beside.on(rank, lane)
    edges = np.stack([beside.begin[rows], beside.finish[rows]]) * grid.scale
    style = Style(palette.INKS[0], palette.LANES[LANES[lane]]) if colours else Style()
    column = 0
    for row, (begin, end) in zip(rows.tolist(), np.rint(edges.T).astype(int).tolist(), strict=True):
        first = max(begin, column)
        last = min(max(end, first + 1), grid.columns)
        if first >= last:
            continue
        text = beside.numeral(row)
        if len(text) > last - first:
            text = ""
        yield StyledText(" " * (first - column))
        if colours:
            apart = int(last - first > len(text))
            yield StyledText(text.center(last - first - apart) + "▕" * apart, style)
        else:
            yield StyledText(text.ljust(last - first, _MOVES))
        column = last


def lane_items(charts: Sequence[Chart], colours: int) -> Iterator[list[StyledText]]:
    """The legend of the lanes in use."""
    texts = {lane: text for chart in charts if (beside := chart.cells.beside) for lane, text in beside.legend()}
    for lane in sorted(texts):
        swatch = StyledText("  ", Style(fill=palette.LANES[LANES[lane]])) if colours else StyledText(_MOVES)
        yield [swatch, StyledText(f" {texts[lane]}")]
