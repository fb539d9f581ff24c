"""A schedule in time as one self-contained SVG, in the visual language of the DualPipe figures."""

from __future__ import annotations

from schedc.analysis.memory import Memory
from schedc.analysis.timeline import Timeline
from schedc.draw import frame, lanes, strips
from schedc.draw.cells import cells_of
from schedc.draw.facts import figures, sizes, weighted
from schedc.draw.layout import GUTTER, LANE, MARGIN, STRIP_LANE, STRIPS_ABOVE, Layout, plot_size
from schedc.draw.markup import quantity
from schedc.draw.style import document
from schedc.ir.schedule import Schedule
from schedc.source import first_sentence


def draw_svg(schedule: Schedule, timeline: Timeline, memory: Memory, *, title: str | None = None) -> str:
    """The drawing: a lane per rank with its cells at their times, and what the rank holds below.

    The same input gives the same bytes. Above `layout.STRIPS_ABOVE` cells the lanes are strips without numerals;
    the drawing says so. ``title`` stands in for the schedule's name.
    """
    cells = cells_of(schedule, timeline, memory)
    curves = [cells.curve(rank) for rank in range(schedule.ranks)]
    highest = max((curve.peak for curve in curves), default=0.0)
    as_strips = len(cells) > STRIPS_ABOVE
    scale, plot_width = plot_size(cells)
    stages = frame.stage_texts(cells)
    left = MARGIN + (GUTTER if as_strips else frame.gutter_width(stages))
    width = left + plot_width + GUTTER + MARGIN

    name = title or schedule.name
    head, y = frame.header(name, first_sentence(schedule.doc), _header_facts(schedule, timeline, memory), width)
    held = f"{'memory' if weighted(memory) else 'activations'} held (full height: {quantity(highest)})"
    key, y = frame.legend(cells, held, as_strips, y, width)
    layout = Layout(scale, left, y + 30, plot_width, STRIP_LANE if as_strips else LANE, schedule.ranks, as_strips)
    parts = [*head, *key, *frame.axis(cells, layout)]
    parts += frame.gutter(cells, layout, stages, [f"peak {quantity(curve.peak)}" for curve in curves])
    lane = strips.lane if as_strips else lanes.lane
    for rank, curve in enumerate(curves):
        parts += lane(cells, rank, layout)
        shown = strips.coarse(curve, cells.makespan, layout) if as_strips else curve
        parts += lanes.memory(shown, highest, rank, layout)
    foot, bottom = frame.footer(layout, strips.note(cells, layout) if as_strips else "")
    return document([*parts, *foot], width, bottom, name, schedule.doc)


def _header_facts(schedule: Schedule, timeline: Timeline, memory: Memory) -> list[str]:
    told = figures(schedule, timeline, memory)
    stages = f"{told['stages']} stage{'s' * (schedule.stages != 1)}"
    if "pipes" in told:
        stages += f" in {told['pipes']} pipes"
    chosen = ("makespan", "bubble per rank", "bubble ratio", "peak activations", "peak memory")
    facts = [sizes(schedule), stages, *(f"{what} {told[what]}" for what in chosen if what in told)]
    return [fact for fact in facts if fact]
