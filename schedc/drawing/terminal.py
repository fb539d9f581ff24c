"""A schedule over time as text: one line per rank, in coloured blocks, or in letters where there is no colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.drawing import palette
from schedc.drawing.ansi import NORMAL, PLAIN, Style, StyledText, paint
from schedc.drawing.chart import Chart, longest
from schedc.drawing.layout import tick_step
from schedc.drawing.markup import quantity
from schedc.drawing.work_rows import CharacterGrid, lane_items, lane_rows
from schedc.ir.arrays import Int64
from schedc.ir.ops import FACTS, LETTERS, OpKind
from schedc.step.bubbles import (
    COOLDOWN,
    DEPENDENCY,
    EXPOSED,
    IMBALANCE,
    MESSAGE,
    WARM_UP,
    WORK_CLASSES,
)
from schedc.step.work_runs import WorkRuns

_WIDEST_CELL = 8
"""Most columns of the shortest cell, since a tiny schedule need not fill a wide screen."""
_NARROWEST = 10
_FACTS = ("makespan", "bubble ratio", "span bubble ratio", "peak activations", "peak memory")
"""The figures above the lanes. A chart has the last one if its costs give activations a size."""

_OVER = -1 - len(WORK_CLASSES)
"""The sample of a time after the makespan. Idle time of class i has the sample -1 - i, work the row of its op."""

_IDLE = {WARM_UP: "··", COOLDOWN: "··", DEPENDENCY: "░:", MESSAGE: "≈~", IMBALANCE: "▒%", EXPOSED: "╳x"}
"""Characters for idle time of each class: in coloured drawings, and in ASCII."""
_ASCII_REST = "."

_FAINT = Style(faint=True)
_BOLD = Style(bold=True)


def draw_terminal(charts: Sequence[Chart], width: int, *, colours: int = PLAIN) -> str:
    """The charts above each other on one time axis, in lines of at most ``width`` characters (from 24).

    colours: `ansi.PLAIN`, `CUBE` or `TRUE`. A column shows the op that runs in the middle of it; with colours, in the
    middle of each of its halves. Shorter cells may therefore be missing. Numerals are microbatches, where they fit.
    """
    left = max(len(_rank_name(chart.schedule.ranks - 1)) for chart in charts) + 1
    figures = [_figures(chart) for chart in charts]
    right = max(len(rows[0]) for rows in figures)
    grid = _grid(charts, width - left, right)
    lines: list[str] = []
    for chart, rows in zip(charts, figures, strict=True):
        facts = dict(chart.facts)
        title = ", ".join([chart.title, *map(" ".join, chart.origin)])
        lines += [paint([StyledText(row, _BOLD)], colours) for row in wrap(title, width)]
        lines += wrap(
            ", ".join(f"{name} {facts[name]}{_unit(name, facts[name])}" for name in _FACTS if name in facts), width
        )
        axis = [StyledText("time".ljust(left) + _axis(grid), _FAINT)]
        lines.append(paint([*axis, StyledText(rows[0], _FAINT)] if grid.figures else axis, colours).rstrip())
        for rank in range(chart.schedule.ranks):
            name = StyledText(_rank_name(rank).ljust(left), _BOLD)
            lane = _coloured(chart, rank, grid) if colours else _letters(chart, rank, grid)
            lines.append(paint([name, *lane, StyledText(rows[1 + rank] if grid.figures else "")], colours).rstrip())
            lines += [
                paint(texts, colours).rstrip() for texts in lane_rows(chart.cells.beside, rank, grid, left, colours)
            ]
        lines.append("")
    return "\n".join([*lines, *_legend(charts, width, colours)]) + "\n"


def _rank_name(rank: int) -> str:
    return f"rank {rank}"


def _unit(name: str, value: str) -> str:
    """The unit of a figure, where it is not the unit of the time axis."""
    if name == "peak activations":
        return " chunk" if value == "1" else " chunks"
    return " in the unit of the costs" if name == "peak memory" else ""


def _figures(chart: Chart) -> list[str]:
    """Heading and one row per rank of the figures right of the lanes, equally wide. Units stand above the lanes."""
    heading, peaks = "peak", chart.memory.peak_activations.astype(np.float64)
    if chart.weighted:
        heading, peaks = "peak memory", chart.memory.peak_memory
    columns = [
        ["bubble", *map(quantity, chart.timeline.bubble.tolist())],
        [heading, *map(quantity, peaks.tolist())],
    ]
    widths = [max(map(len, column)) for column in columns]
    return [
        "".join("  " + text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in zip(*columns, strict=True)
    ]


def _grid(charts: Sequence[Chart], room: int, figures: int) -> CharacterGrid:
    """The grid, with whole columns for the shortest cell where they fit, so that equal cells look equal."""
    shown = room - figures >= 2 * _NARROWEST
    most = max(_NARROWEST, room - figures if shown else room)
    whole = longest(charts)
    if whole <= 0:
        return CharacterGrid(most, 0.0, shown)
    lengths = np.concatenate([chart.cells.end - chart.cells.start for chart in charts])
    shortest = float(lengths[lengths > 0].min())
    per_cell = min(int(most * shortest / whole * (1 + 1e-9)), _WIDEST_CELL)
    scale = per_cell / shortest if per_cell else most / whole
    return CharacterGrid(min(most, max(1, int(np.ceil(whole * scale * (1 - 1e-9))))), scale, shown)


def _axis(grid: CharacterGrid) -> str:
    """Times above their columns, in steps of 1, 2 or 5 times a power of ten."""
    row = [" "] * grid.columns
    step = tick_step(grid.scale, 8) if grid.scale else 0.0
    for i in range(int(grid.columns / (step * grid.scale)) + 1 if step else 0):
        text, column = quantity(i * step), round(i * step * grid.scale)
        if column + len(text) <= grid.columns:
            row[column : column + len(text)] = text
    return "".join(row)


def _samples(chart: Chart, rank: int, grid: CharacterGrid, per_column: int) -> Int64:
    """[columns * per_column] The op of the rank in the middle of each part of a column, or idle time; see `_OVER`."""
    count = grid.columns * per_column
    if not grid.scale:
        return np.full(count, _OVER)
    times = (np.arange(count) + 0.5) / (per_column * grid.scale)
    result = np.where(times < chart.timeline.makespan, _idle_class(chart, rank, times), _OVER)
    cells, of_rank = chart.cells, chart.cells.of_rank(rank)
    start, end = cells.start[of_rank], cells.end[of_rank]
    latest = np.searchsorted(start, times, side="right") - 1
    running = np.flatnonzero((latest >= 0) & (times < end[np.maximum(latest, 0)]) if start.size else latest > 0)
    cell = latest[running] + of_rank.start
    in_second = times[running] >= cells.middle[cell]
    result[running] = np.where(in_second & (cells.second[cell] >= 0), cells.second[cell], cells.first[cell])
    return result


def _idle_class(chart: Chart, rank: int, times: npt.NDArray[np.floating[Any]]) -> Int64:
    """[times] -1 - class of the idle time. Where the rank is busy, the value has no meaning."""
    bubbles = chart.bubbles
    mine = bubbles.rank == rank
    parts = bubbles.parts[:, mine]
    begins = (bubbles.start[mine] + np.cumsum(parts, axis=0) - parts).T.ravel()
    piece = np.searchsorted(begins, times, side="right") - 1
    idle = np.maximum(piece, 0) % len(parts)
    return np.asarray(-1 - (idle if chart.works is None else _at_joins(chart.works, rank, times, idle)), np.int64)


def _at_joins(works: WorkRuns, rank: int, times: npt.NDArray[np.floating[Any]], idle: Int64) -> Int64:
    """[times] the class of the idle time, with the times at JOINs where they are; `Bubbles` has only their sums."""
    result = np.where(idle == EXPOSED, DEPENDENCY, idle)
    for row, begin, end in works.waits:
        if works.rank[row] == rank:
            result[(times >= begin) & (times < end)] = EXPOSED
    return result


def _runs(samples: Int64) -> Iterator[tuple[int, int, int]]:
    """(first, end, value) of each run of equal samples."""
    heads = np.flatnonzero(np.diff(samples, prepend=samples[0] - 1))
    for first, end in zip(heads.tolist(), [*heads[1:].tolist(), samples.size], strict=True):
        yield first, end, int(samples[first])


def _letters(chart: Chart, rank: int, grid: CharacterGrid) -> list[StyledText]:
    """A lane in ASCII, as ``F0--B0----``: the letter (lower case: odd chunk), and the microbatch where it fits."""
    parts = []
    for first, end, value in _runs(_samples(chart, rank, grid, 1)):
        width = end - first
        if value < 0:
            parts.append((" " if value == _OVER else _idle_letter(-1 - value)) * width)
            continue
        schedule = chart.schedule
        letter = LETTERS[schedule.kind[value]]
        letter = letter.lower() if chart.cells.chunk[value] % 2 else letter
        name = f"{letter}{schedule.microbatch[value]}"
        parts.append((name if len(name) <= width else letter).ljust(width, "-"))
    return [StyledText("".join(parts))]


def _idle_letter(idle: int) -> str:
    return _ASCII_REST if idle in (WARM_UP, COOLDOWN) else _IDLE[idle][1]


def _coloured(chart: Chart, rank: int, grid: CharacterGrid) -> list[StyledText]:
    """A lane of blocks in the colours of `palette`, half a column fine, with the microbatch where it fits."""
    samples = _samples(chart, rank, grid, 2)
    glyphs = [_block(chart, left, right) for left, right in samples.reshape(-1, 2).tolist()]
    for first, end, value in _runs(samples):
        begin, width = -(-first // 2), end // 2 - -(-first // 2)
        text = str(chart.schedule.microbatch[value]) if value >= 0 else ""
        if not text or width < len(text) + (len(text) > 1):
            continue
        style = _style(chart, value)
        apart = int(width > len(text) and end < samples.size and samples[end] >= 0)
        label = text.center(width - apart) + "▕" * apart
        glyphs[begin : begin + width] = [StyledText(character, style) for character in label]
    return glyphs


def _block(chart: Chart, left: int, right: int) -> StyledText:
    """One column whose halves have the samples left and right."""
    if left < 0 and right < 0:
        return StyledText(" " if left == _OVER else _IDLE[-1 - left][0], _FAINT)
    if left == right:
        return StyledText(" ", _style(chart, left))
    fills = [_style(chart, value).fill if value >= 0 else "" for value in (left, right)]
    if not fills[0]:
        return StyledText("▐", Style(ink=fills[1]))
    return StyledText("▌", Style(ink=fills[0], fill=fills[1]))


def _style(chart: Chart, row: int) -> Style:
    chunk = int(chart.cells.chunk[row])
    fill = palette.FILLS[OpKind(int(chart.schedule.kind[row]))][palette.shade_of(chunk)]
    return Style(palette.INKS[palette.ink_of(chunk)], fill, underlined=bool(chart.schedule.pair[row] >= 0))


def _legend(charts: Sequence[Chart], width: int, colours: int) -> list[str]:
    """The meaning of letters, colours and dots, in lines of at most ``width`` characters."""
    kinds = {int(kind) for chart in charts for kind in np.unique(chart.schedule.kind)}
    chunks = min(2, max(chart.schedule.placement.chunks for chart in charts))
    items: list[list[StyledText]] = []
    for kind in (kind for kind in OpKind if kind in kinds):
        swatches = [StyledText("  ", Style(fill=fill)) for fill in palette.FILLS[kind][:chunks]] if colours else []
        items.append([*swatches, StyledText(f"{' ' * bool(swatches)}{kind.name} {FACTS[kind].name}")])
    if chunks > 1:
        items.append([StyledText("odd chunks: " + ("deep colours" if colours else "lower case"))])
    if colours and any((chart.schedule.pair >= 0).any() for chart in charts):
        items.append([StyledText("12", Style(underlined=True)), StyledText(" overlapped pair")])
    items += lane_items(charts, colours)
    signs: dict[str, list[str]] = {}
    for idle, name in enumerate(WORK_CLASSES):
        if any(chart.bubbles.totals[idle : idle + 1].any() for chart in charts):
            signs.setdefault(_IDLE[idle][0] if colours else _idle_letter(idle), []).append(name)
    items += [[StyledText(sign, _FAINT), StyledText(f" {' or '.join(names)}")] for sign, names in signs.items()]
    lines: list[list[StyledText]] = [[]]
    for item in items:
        if lines[-1] and _length(lines[-1]) + 3 + _length(item) > width:
            lines.append([])
        lines[-1] += [StyledText("   ", NORMAL)] * bool(lines[-1]) + item
    return [paint(line, colours) for line in lines]


def _length(texts: Sequence[StyledText]) -> int:
    return sum(len(text.characters) for text in texts)
