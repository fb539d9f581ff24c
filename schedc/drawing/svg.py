"""A schedule over time as one self-contained SVG, in the visual language of the DualPipe figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schedc.diagnostics import CompilerBug
from schedc.drawing import frame, lanes, strips, work_lanes
from schedc.drawing.cells import CellColumns, cells_of
from schedc.drawing.facts import figures, weighted
from schedc.drawing.layout import GUTTER, LANE, MARGIN, STRIP_LANE, Detail, DrawingLayout, first_detail, plot_size
from schedc.drawing.markup import quantity
from schedc.drawing.style import NO_MORE, WORKS, document
from schedc.ir.schedule import Schedule
from schedc.source import first_sentence
from schedc.step.copy_runs import CopyRuns
from schedc.step.memory import Memory
from schedc.step.timeline import Timeline
from schedc.step.work_runs import WorkRuns
from schedc.units import equations

LIMIT = 2_000_000
"""Bytes of the largest drawing: with more, viewers and browsers get slow."""

_LONGEST_DOC = 20_000
"""Characters of documentation that a drawing carries as its description."""


class Picture(NamedTuple):
    """A drawing, and a note on what it leaves out; the note is empty if the drawing shows everything."""

    text: str
    note: str = ""


def draw_svg(
    schedule: Schedule,
    timeline: Timeline,
    memory: Memory,
    works: WorkRuns | None = None,
    *,
    copies: CopyRuns | None = None,
    origin: Sequence[tuple[str, str]] = (),
    title: str | None = None,
    width: float | None = None,
) -> str:
    """The text of `picture`. width: px."""
    return picture(schedule, timeline, memory, works, copies=copies, origin=origin, title=title, width=width).text


def picture(
    schedule: Schedule,
    timeline: Timeline,
    memory: Memory,
    works: WorkRuns | None = None,
    *,
    copies: CopyRuns | None = None,
    origin: Sequence[tuple[str, str]] = (),
    title: str | None = None,
    width: float | None = None,
) -> Picture:
    """The drawing: a lane per rank with cells at their times; works, copies and memory below.

    The same input gives the same bytes, at most `LIMIT` of them. Above `layout.STRIPS_ABOVE` cells the lanes are strips
    without numerals. Above `layout.LANES` ranks, or where strips are too large, edges are rounded more and lanes left
    out. The drawing says so.
    origin: (name, value) of what the times are from. title: replaces the schedule's name. width: px, at least
    `layout.NARROWEST`; by default, as many as the cells need.
    """
    cells = cells_of(schedule, timeline, memory, works, copies)
    detail: Detail | None = first_detail(cells)
    while detail:
        result = _drawn(cells, timeline, memory, origin, title or schedule.name, detail, width)
        size = len(result.text.encode())
        if size <= LIMIT:
            return result
        detail = detail.coarser(size / LIMIT, schedule.ranks)
    raise CompilerBug("draw", f"a drawing of two lanes of strips takes {size} bytes")


def _drawn(
    cells: CellColumns,
    timeline: Timeline,
    memory: Memory,
    origin: Sequence[tuple[str, str]],
    name: str,
    detail: Detail,
    wanted: float | None,
) -> Picture:
    schedule, beside = cells.schedule, cells.beside
    curves = [cells.curve(rank) for rank in range(schedule.ranks)]
    highest = max((curve.peak for curve in curves), default=0.0)
    stages = frame.stage_texts(cells)
    left = MARGIN + (GUTTER if detail.strips else frame.gutter_width(stages, beside is not None))
    around = left + GUTTER + MARGIN
    scale, plot_width = plot_size(cells, detail.strips, None if wanted is None else wanted - around)
    width = around + plot_width

    facts = [*_header_facts(schedule, timeline, memory), *map(" ".join, origin)]
    head, y = frame.header(name, first_sentence(schedule.doc), facts, width)
    held = f"{'memory' if weighted(memory) else 'activations'} held (full height: {quantity(highest)})"
    key, y = frame.legend(cells, held, detail.strips, y, width)
    rows = STRIP_LANE if detail.strips else LANE
    used = () if beside is None else tuple(len(beside.lanes_of(rank)) for rank in range(schedule.ranks))
    layout = DrawingLayout(scale, left, y + 30, plot_width, rows, schedule.ranks, detail, used)
    parts = [*head, *key, *frame.axis(cells, layout)]
    parts += frame.gutter(cells, layout, stages, [f"peak {quantity(curve.peak)}" for curve in curves])
    for rank in layout.shown:
        if detail.strips:
            parts += strips.lane_strip(cells, rank, layout)
            parts += work_lanes.lanes_as_strips(beside, rank, layout) if beside is not None else []
            parts += strips.memory_strip(curves[rank], cells.makespan, highest, rank, layout)
        else:
            parts += lanes.lane(cells, rank, layout)
            parts += work_lanes.lanes(beside, rank, layout) if beside is not None else []
            parts += lanes.memory(curves[rank], highest, rank, layout)
    note = strips.note(cells, layout) if detail.strips else ""
    foot, bottom = frame.footer(layout, note, width)
    more = NO_MORE if beside is None else WORKS
    doc = schedule.doc if len(schedule.doc) <= _LONGEST_DOC else schedule.doc[:_LONGEST_DOC] + "…"
    return Picture(document([*parts, *foot], width, bottom, name, doc, more), note)


def _header_facts(schedule: Schedule, timeline: Timeline, memory: Memory) -> list[str]:
    values = figures(schedule, timeline, memory)
    stages = f"{values['stages']} stage{'s' * (schedule.stages != 1)}"
    if "pipes" in values:
        stages += f" in {values['pipes']} pipes"
    chosen = ("makespan", "bubble per rank", "bubble ratio", "peak activations", "peak memory")
    facts = [equations(schedule.sizes), stages, *(f"{name} {values[name]}" for name in chosen if name in values)]
    return [fact for fact in facts if fact]
