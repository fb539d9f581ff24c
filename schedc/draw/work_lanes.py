"""The works of a rank in a drawing: a strip per lane that the rank uses, and hatching where it stands at a JOIN."""

from __future__ import annotations

import numpy as np

from schedc.draw.layout import DrawingLayout
from schedc.draw.markup import box, content, label, number, quantity, text_width
from schedc.draw.strips import strokes
from schedc.ir.works import FACTS, KIND_NAMES, LANE_NAMES, WorkKind, WorkLane
from schedc.step.work_runs import WorkRuns
from schedc.units import plain, shown

_NUMERAL, _SMALLEST = 9.0, 6.0


def lanes(works: WorkRuns, rank: int, layout: DrawingLayout) -> list[str]:
    """An element per work in the strips of a rank, and one per time that the rank stands at a JOIN."""
    parts = [_stand(works, row, layout, begin, end) for row, begin, end in works.waits if works.rank[row] == rank]
    for place, lane in enumerate(works.lanes_of(rank)):
        parts.append(_name(rank, place, lane, layout))
        parts += [_work(works, row, place, layout) for row in works.on(rank, lane).tolist()]
    return parts


def lanes_as_strips(works: WorkRuns, rank: int, layout: DrawingLayout) -> list[str]:
    """The same in a few paths: one per lane, and one for the times at JOINs."""
    parts = []
    waits = [wait for wait in works.waits if works.rank[wait[0]] == rank]
    if waits:
        begin, end = (np.array([wait[i] for wait in waits]) for i in (1, 2))
        y = layout.cells_y(rank) + layout.rows.cells / 2
        parts.append(strokes(layout, y, "standing", begin, end))
    for place, lane in enumerate(works.lanes_of(rank)):
        rows = works.on(rank, lane)
        y = layout.works_y(rank, place) + layout.rows.works / 2
        path = strokes(layout, y, LANE_NAMES[lane], works.times.begin[rows], works.times.finish[rows])
        title = content(f"rank {rank}, lane {LANE_NAMES[lane]}: {rows.size} works")
        parts += [_name(rank, place, lane, layout), f'<g class="lane"><title>{title}</title>{path}</g>']
    return parts


def work_hover(works: WorkRuns, row: int) -> list[str]:
    """What there is to say of a work, line by line."""
    work = works.works.work(row)
    size = shown(work.bytes) if works.in_bytes else plain(work.bytes)
    times = works.times
    begin, finish, exposed = (float(column[row]) for column in (times.begin, times.finish, times.exposed))
    stands = f"its rank stands {quantity(exposed)} at the JOIN" if exposed > 0 else "nothing exposed"
    moves = f"lane {LANE_NAMES[work.lane]}, moves {size}"
    return [str(work), moves, f"{quantity(begin)} to {quantity(finish)}", stands]


def numeral(works: WorkRuns, row: int) -> str:
    """What stands in a work: its microbatch; of one that concerns a stage two letters of its kind, and the stage."""
    microbatch = int(works.works.microbatch[row])
    return str(microbatch) if microbatch >= 0 else f"{KIND_NAMES[works.works.kind[row]][:2]}{works.works.stage[row]}"


def _name(rank: int, place: int, lane: WorkLane, layout: DrawingLayout) -> str:
    y = layout.works_y(rank, place) + layout.rows.works / 2 + 3
    return label(layout.left - 6, y, LANE_NAMES[lane], "lane-name")


def _work(works: WorkRuns, row: int, place: int, layout: DrawingLayout) -> str:
    begin, finish, rank = float(works.times.begin[row]), float(works.times.finish[row]), int(works.rank[row])
    y, height, width = layout.works_y(rank, place), layout.rows.works, (finish - begin) * layout.scale
    title = content("; ".join([*work_hover(works, row), f"rank {rank}"]))
    rect = box(layout.x(begin), y + 1, max(width, 0.5), height - 1, LANE_NAMES[works.works.lane[row]])
    text = numeral(works, row)
    size = min(_NUMERAL, np.floor(2 * (width - 2) / text_width(text, 1.0)) / 2)
    if size >= _SMALLEST:
        middle = layout.x((begin + finish) / 2)
        rect += label(middle, y + (height + 1) / 2 + 0.36 * size, text, "n i0", font_size=number(size))
    return f'<g class="work"><title>{title}</title>{rect}</g>'


def _stand(works: WorkRuns, row: int, layout: DrawingLayout, begin: float, end: float) -> str:
    y = layout.cells_y(int(works.rank[row]))
    rect = box(layout.x(begin), y, (end - begin) * layout.scale, layout.rows.cells, "stands")
    when = f"{quantity(begin)} to {quantity(end)} ({quantity(end - begin)})"
    title = content(f"stands at the JOIN of {works.works.work(row)}, {when}")
    return f'<g class="stand"><title>{title}</title>{rect}</g>'


def legend_texts(works: WorkRuns) -> list[tuple[WorkLane, str]]:
    """Each lane in use, with what its works do: ``offload on the lane d2h``."""
    kinds = [WorkKind(kind) for kind in np.unique(works.works.kind).tolist()]
    lanes = sorted({FACTS[kind].lane for kind in kinds})
    return [
        (lane, f"{', '.join(FACTS[kind].name for kind in kinds if FACTS[kind].lane == lane)} ({LANE_NAMES[lane]})")
        for lane in lanes
    ]
