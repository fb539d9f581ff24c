"""A schedule in time as one self-contained SVG, in the visual language of the DualPipe figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.analysis.memory import Memory
from schedc.analysis.timeline import Timeline
from schedc.draw import frame, lanes, strips
from schedc.draw.cells import cells_of
from schedc.draw.layout import GUTTER, LANE, MARGIN, STRIP_LANE, STRIPS_ABOVE, Layout, plot_size
from schedc.draw.markup import quantity
from schedc.draw.style import document
from schedc.ir.schedule import Schedule


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
    head, y = frame.header(name, _first_sentence(schedule.doc), _facts(schedule, timeline, memory), width)
    held = f"{'memory' if _weighted(memory) else 'activations'} held (full height: {quantity(highest)})"
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
