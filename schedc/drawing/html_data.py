"""The data of a page as JSON that is safe inside a script element: texts, figures, and packed columns."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.drawing import palette
from schedc.drawing.chart import Chart, longest
from schedc.drawing.html_columns import Packer, Steps, in_steps
from schedc.drawing.html_works import work_facts, work_table
from schedc.drawing.markup import plain_markup
from schedc.drawing.offline_page import page_json
from schedc.ir.ops import FACTS, LETTERS, OpKind
from schedc.step.bubbles import EXPOSED, IMBALANCE, MESSAGE, OVERHEAD, RUN_CLASSES, WORK_CLASSES


def page_data(charts: Sequence[Chart]) -> str:
    """A JSON object, written by `schedc.drawing.offline_page.page_json`.

    kinds: letter and name of each op kind, by its value. classes: names of `schedc.step.bubbles.RUN_CLASSES`,
    or of `WORK_CLASSES` where a chart has works.
    timeUnit: "ms" where a run was measured, else "". fills: the two shades of each kind. inks, phaseTints: see
    `schedc.drawing.palette`. longest: time at the end of the common axis.
    charts: see `chart_data`. ``twin`` of a measured run is the number of the chart that predicts it, and the other way
    round; else -1.
    packed: base64 of the columns of all tables, see `schedc.drawing.html_columns`.
    """
    packer = Packer()
    page = {
        "kinds": [{"letter": LETTERS[kind], "name": FACTS[kind].name} for kind in OpKind],
        "classes": WORK_CLASSES if any(chart.works is not None for chart in charts) else RUN_CLASSES,
        "timeUnit": "ms" if any(chart.measured for chart in charts) else "",
        "fills": [palette.FILLS[kind] for kind in OpKind],
        "inks": palette.INKS,
        "phaseTints": palette.PHASES,
        "longest": longest(charts),
        "charts": [{**chart_data(chart, packer), "twin": _twin(chart, charts)} for chart in charts],
        "packed": b64encode(packer.deflated()).decode(),
    }
    return page_json(page)


def chart_data(chart: Chart, packer: Packer) -> dict[str, Any]:
    """A chart: texts and figures as they are, and three tables whose columns go to ``packer``.

    cells: a row per cell; rank r has the rows rankStart[r] ..< rankStart[r + 1].
        ``kind``, ``stage``, ``microbatch``, ``phase``; ``bound``, which is `Timeline.bound_by` less the cell's number.
        ``held``, the highest memory while the cell runs; ``after``, the memory after it.
        ``wait``, the time from the end of the row before to the start; ``length``, the time of the cell.
        With overlapped pairs also ``kind2``, ``stage2``, ``microbatch2`` (-1 for single ops), and ``lead``, the time
        from the start to the second half. These three times are whole steps of 10**-timeDecimals.
    gaps: a row per idle interval: ``rank``, ``cell``, ``wait``, ``length``, and its time in each class, ``part0`` ...
    path: ``cell``, the critical path.
    works: with works alone, see `schedc.drawing.html_works`.
    ``chunk`` is by pipe and stage, ``totals`` by class and rank. ``used`` has the op kinds that occur, ``classes`` the
    classes that idle time can have here. Only these have a ``part``, and only their ``totals`` are shown.
    """
    schedule, cells, bubbles = chart.schedule, chart.cells, chart.bubbles
    decimals, cell_columns, gap_columns = _tables(chart)
    return {
        "title": chart.title,
        "summary": chart.summary,
        "facts": chart.facts,
        "ranks": schedule.ranks,
        "timeDecimals": decimals,
        "measured": chart.measured,
        "p2p": chart.p2p,
        "makespan": _numbers(np.array([chart.timeline.makespan]))[0],
        "unit": "memory" if chart.weighted else "activations",
        "phases": [plain_markup(name) for name in cells.phase_names],
        "used": np.unique(schedule.kind).tolist(),
        "rankStart": _numbers(cells.rank_start),
        "firstMicrobatch": list(schedule.placement.first_microbatch),
        "chunk": schedule.placement.chunk_of.tolist(),
        "tables": {
            "cells": packer.table(cell_columns, running=("microbatch", "microbatch2", "held", "after")),
            "gaps": packer.table(gap_columns, running=("rank", "cell")),
            "path": packer.table({"cell": _whole(chart.critical)}, running=("cell",)),
            **work_table(chart.cells.beside, packer),
        },
        **work_facts(chart.cells.beside),
        "totals": [_numbers(total) for total in bubbles.totals],
        "classes": _classes(chart),
        "busy": _numbers(chart.timeline.busy),
        "bubble": _numbers(chart.timeline.bubble),
        "peaks": _numbers(chart.memory.peak_memory if chart.weighted else chart.memory.peak_activations),
    }


def _tables(chart: Chart) -> tuple[int, dict[str, Steps], dict[str, Steps]]:
    """The decimals of times, and the columns of cells and of gaps: all times are multiples of one step."""
    cells, bubbles = chart.cells, chart.bubbles
    start, end, middle, gap_start, gap_end, *parts = in_steps(
        cells.start, cells.end, cells.middle, bubbles.start, bubbles.end, *bubbles.parts
    )
    gaps = {"rank": _whole(bubbles.rank), "cell": _whole(bubbles.cell), **_times(gap_start, gap_end)}
    gaps |= {f"part{i}": parts[i] for i in _classes(chart)}
    return start.decimals, _cell_columns(chart, start, middle, end), gaps


def _cell_columns(chart: Chart, start: Steps, middle: Steps, end: Steps) -> dict[str, Steps]:
    schedule, cells, bound = chart.schedule, chart.cells, chart.timeline.bound_by
    held, after = in_steps(cells.held, cells.after)
    columns = {
        "kind": _whole(schedule.kind[cells.first]),
        "stage": _whole(schedule.stage[cells.first]),
        "microbatch": _whole(schedule.microbatch[cells.first]),
        "phase": _whole(cells.phase),
        "bound": _whole(bound - np.arange(bound.size)),
        "held": held,
        "after": after,
        **_times(start, end),
    }
    paired = cells.second >= 0
    if paired.any():
        for name in ("kind", "stage", "microbatch"):
            columns[f"{name}2"] = _whole(np.where(paired, getattr(schedule, name)[cells.second], -1))
        columns["lead"] = _less(middle, start)
    return columns


def _twin(chart: Chart, charts: Sequence[Chart]) -> int:
    """The number of the chart that predicts this chart's run, or has the run that this chart predicts; else -1."""
    twins = (i for i, c in enumerate(charts) if c.schedule is chart.schedule and c.measured != chart.measured)
    return next(twins, -1)


def _classes(chart: Chart) -> list[int]:
    """Numbers of the `RUN_CLASSES` that idle time can have here: a run knows no cause that follows from costs."""
    absent = {MESSAGE, IMBALANCE} if chart.measured else {OVERHEAD, *([] if chart.p2p > 0 else [MESSAGE])}
    return [*(i for i in range(len(RUN_CLASSES)) if i not in absent), *([] if chart.works is None else [EXPOSED])]


def _whole(values: npt.NDArray[Any]) -> Steps:
    return in_steps(values)[0]


def _less(minuend: Steps, subtrahend: Steps) -> Steps:
    return Steps(minuend.values - subtrahend.values)


def _times(start: Steps, end: Steps) -> dict[str, Steps]:
    """[rows] waits since the end of the row before, which are mostly 0, and lengths, which mostly repeat."""
    before = np.concatenate([[0], end.values[:-1]])[: end.values.size]
    return {"wait": Steps(start.values - before), "length": _less(end, start)}


def _numbers(values: npt.NDArray[Any]) -> list[Any]:
    """The values in their shortest form in JSON: whole numbers without a point, others without rounding errors."""
    (column,) = in_steps(values)
    exact = column.values if column.decimals == 0 else column.values / 10.0**column.decimals
    return exact.tolist()  # type: ignore[no-any-return]
