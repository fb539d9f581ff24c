"""A schedule in time as one self-contained SVG, in the visual language of the DualPipe figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.analysis.memory import Memory
from schedc.analysis.timeline import Timeline
from schedc.draw import frame, lanes, palette, strips
from schedc.draw.cells import cells_of
from schedc.draw.layout import GUTTER, LANE, MARGIN, STRIP_LANE, STRIPS_ABOVE, Layout, plot_size
from schedc.draw.markup import content, label, number, quantity
from schedc.ir.schedule import Schedule

_FONT = "DejaVu Sans,Verdana,Helvetica,Arial,sans-serif"


def draw_svg(schedule: Schedule, timeline: Timeline, memory: Memory, *, title: str | None = None) -> str:
    """The drawing: a lane per rank with its cells at their times, and what the rank holds below.

    The same input gives the same bytes. Above `layout.STRIPS_ABOVE` cells the lanes are strips without numerals;
    the drawing says so. ``title`` stands in for the schedule's name.
    """
    cells = cells_of(schedule, timeline, memory)
    curves = [cells.curve(rank) for rank in range(schedule.ranks)]
    highest = max((curve.peak for curve in curves), default=0.0)
    drawn_strips = len(cells) > STRIPS_ABOVE
    scale, plot_width = plot_size(cells)
    stages = frame.stage_texts(cells)
    left = MARGIN + (GUTTER if drawn_strips else frame.gutter_width(stages))
    width = left + plot_width + GUTTER + MARGIN

    parts, y = frame.header(
        title or schedule.name, _first_sentence(schedule.doc), _facts(schedule, timeline, memory), width
    )
    held = f"{'memory' if _weighted(memory) else 'activations'} held (full height: {quantity(highest)})"
    key, y = frame.legend(cells, held, drawn_strips, y, width)
    layout = Layout(scale, left, y + 30, plot_width, STRIP_LANE if drawn_strips else LANE, schedule.ranks, drawn_strips)
    parts += key + frame.axis(cells, layout)
    parts += frame.gutter(cells, layout, stages, [f"peak {quantity(curve.peak)}" for curve in curves])
    for rank, curve in enumerate(curves):
        parts += strips.strip_lane(cells, rank, layout) if drawn_strips else lanes.lane(cells, rank, layout)
        if drawn_strips:
            parts += lanes.phases(cells, rank, layout)
            curve = strips.coarse(curve, cells.makespan, layout)
        parts += lanes.memory(curve, highest, rank, layout)
    bottom = layout.bottom + (28 if schedule.ranks > 4 else 8)
    if drawn_strips:
        grid = cells.makespan / strips.columns(layout)
        note = (
            f"{len(cells)} cells as strips: numerals and hover text left out, touching cells of one colour merged, "
            f"edges rounded to {grid:.2g} of time"
        )
        parts.append(label(MARGIN, bottom + 14, note, "t muted"))
        bottom += 20
    return _document(parts, width, bottom + MARGIN / 2, title or schedule.name, schedule.doc)


def _first_sentence(doc: str) -> str:
    head, stop, _ = " ".join(doc.split()).partition(". ")
    return head + stop.strip()


def _facts(schedule: Schedule, timeline: Timeline, memory: Memory) -> list[str]:
    sizes = ", ".join(f"{name} = {value}" for name, value in schedule.sizes.items())
    pipes = f" in {schedule.placement.pipes} pipes" if schedule.placement.pipes > 1 else ""
    facts = [
        sizes,
        f"{schedule.stages} stage{'s' * (schedule.stages != 1)}{pipes}",
        f"makespan {quantity(timeline.makespan)}",
        f"bubble per rank {_range(timeline.bubble)}",
        f"bubble ratio {100 * timeline.bubble_ratio:.1f} %",
        f"peak activations {_range(memory.peak_activations)}",
    ]
    return [fact for fact in facts if fact] + ([f"peak memory {_range(memory.peak_memory)}"] * _weighted(memory))


def _weighted(memory: Memory) -> bool:
    """Whether the costs give activations a size, so that memory and their number are two things."""
    return not np.array_equal(memory.memory_inside, memory.activations_inside)


def _range(values: npt.NDArray[Any]) -> str:
    low, high = quantity(float(values.min())), quantity(float(values.max()))
    return low if low == high else f"{low} to {high}"


def _style() -> str:
    rules = [
        f"text{{font-family:{_FONT};fill:{palette.TEXT}}}",
        ".title{font-size:18px;font-weight:600}",
        ".t{font-size:12px}",
        f"text.muted{{fill:{palette.MUTED}}}",
        ".rank{font-size:13px;font-weight:600}",
        f".tick{{font-size:10px;fill:{palette.MUTED};text-anchor:middle}}",
        ".left{text-anchor:start}.end-of{text-anchor:end}",
        f".peak{{font-size:11px;fill:{palette.CURVE}}}",
        f".phase-name{{font-size:9.5px;fill:{palette.TEXT}}}",
        f".grid{{stroke:{palette.GRID}}}.end{{stroke:{palette.MUTED};stroke-dasharray:3 3}}",
        ".idle{fill:url(#idle)}",
        f".edge{{fill:none;stroke:{palette.EDGE};stroke-width:2}}",
        f".held{{fill:{palette.CURVE_FILL}}}.curve{{fill:none;stroke:{palette.CURVE};stroke-width:1.2}}",
        f".dot{{fill:{palette.CURVE}}}",
        ".n{text-anchor:middle}.i1,.i2,.i3{font-weight:600}",
        f".paired{{stroke:{palette.EDGE};stroke-width:2;fill:none}}",
        *(f"text.i{i}{{fill:{ink}}}" for i, ink in enumerate(palette.INKS)),
        *(f".p{i}{{fill:{tint}}}" for i, tint in enumerate(palette.PHASES)),
    ]
    for kind, fills in palette.FILLS.items():
        for shade, fill in enumerate(fills):
            rules.append(f".{kind.name}{shade}{{fill:{fill};stroke:{palette.PAPER};stroke-width:.8}}")
            rules.append(f".s{kind.name}{shade}{{stroke:{fill};stroke-width:{number(STRIP_LANE.cells)};fill:none}}")
    return "".join(rules)


def _document(parts: list[str], width: float, height: float, title: str, doc: str) -> str:
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    hatch = (
        '<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{palette.IDLE}"/><path d="M0 0V6" stroke="{palette.HATCH}"/></pattern>'
    )
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{content(title)}</title><desc>{content(doc)}</desc>",
        f"<defs><style>{_style()}</style>{hatch}</defs>",
        f'<rect width="100%" height="100%" fill="{palette.PAPER}"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"
