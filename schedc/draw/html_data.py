"""What the page is given of a schedule, as JSON safe inside a script element: texts, figures, and packed columns."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.analysis.bubbles import IMBALANCE, MESSAGE, OVERHEAD, RUN_CLASSES
from schedc.draw import palette
from schedc.draw.chart import Chart, longest
from schedc.draw.html_columns import Packer, Steps, in_steps
from schedc.draw.markup import plain
from schedc.ir.ops import FACTS, LETTERS, OpKind

_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def page_data(charts: Sequence[Chart]) -> str:
    """One JSON object without ``<``, ``>``, ``&`` and without any character beyond ASCII.

    kinds: letter and name of each op kind, by its value; classes: names of `schedc.analysis.bubbles.RUN_CLASSES`;
    timeUnit: "ms" where a run was measured, else ""; fills: the two shades of each kind; inks, phaseTints: see
    `schedc.draw.palette`; longest: the common time axis.
    charts: see `chart_data`; of a run and its prediction ``twin`` is the number of the other, else -1.
    packed: base64 of the columns of all their tables, see `schedc.draw.html_columns`.
    """
    packer = Packer()
    page = {
        "kinds": [{"letter": LETTERS[kind], "name": FACTS[kind].name} for kind in OpKind],
        "classes": RUN_CLASSES,
        "timeUnit": "ms" if any(chart.measured for chart in charts) else "",
        "fills": [palette.FILLS[kind] for kind in OpKind],
        "inks": palette.INKS,
        "phaseTints": palette.PHASES,
        "longest": longest(charts),
        "charts": [{**chart_data(chart, packer), "twin": _twin(chart, charts)} for chart in charts],
        "packed": b64encode(packer.deflated()).decode(),
    }
    return json.dumps(page, separators=(",", ":")).translate(_ESCAPES)


def chart_data(chart: Chart, packer: Packer) -> dict[str, Any]:
    """A chart: texts and figures as they are, and three tables whose columns go to ``packer``.

    cells: ``kind``, ``stage``, ``microbatch``, ``phase``, ``bound`` (`Timeline.bound_by`, less the cell's number),
    ``held`` (at most, while it runs), ``after``; ``wait``, from the end of the cell before it in the table to its
    start, and ``length``; where pairs overlap also ``kind2``, ``stage2``, ``microbatch2`` (-1 for single ops) and
    ``lead``, from the start to where the second half begins. These three times are whole steps of
    10**-timeDecimals. Rank r has cells rankStart[r] ..< rankStart[r + 1].
    gaps: ``rank``, ``cell``, ``wait`` and ``length`` likewise, and ``part0`` ..., its time in each class.
    path: ``cell``, the critical path.
    ``chunk`` is by pipe and stage, ``totals`` by class and rank, ``used`` the op kinds that occur,
    ``classes`` those that idle time can have here: only these have a ``part`` and are meant in ``totals``.
    """
    schedule, cells, bubbles = chart.schedule, chart.cells, chart.bubbles
    start, end, middle, gap_start, gap_end, *parts = in_steps(
        cells.start, cells.end, cells.middle, bubbles.start, bubbles.end, *bubbles.parts
    )
    held, after = in_steps(np.maximum(cells.inside, _before(chart)), cells.after)
    bound = chart.timeline.bound_by
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
    gaps = {"rank": _whole(bubbles.rank), "cell": _whole(bubbles.cell), **_times(gap_start, gap_end)}
    gaps |= {f"part{i}": parts[i] for i in _classes(chart)}
    return {
        "title": chart.title,
        "summary": chart.summary,
        "facts": chart.facts,
        "ranks": schedule.ranks,
        "timeDecimals": start.decimals,
        "measured": chart.measured,
        "p2p": chart.p2p,
        "makespan": _numbers(np.array([chart.timeline.makespan]))[0],
        "unit": "memory" if chart.weighted else "activations",
        "phases": [plain(name) for name in cells.phase_names],
        "used": np.unique(schedule.kind).tolist(),
        "rankStart": _numbers(cells.rank_start),
        "firstMicrobatch": list(schedule.placement.first_microbatch),
        "chunk": schedule.placement.chunk_of.tolist(),
        "tables": {
            "cells": packer.table(columns, running=("microbatch", "microbatch2", "held", "after")),
            "gaps": packer.table(gaps, running=("rank", "cell")),
            "path": packer.table({"cell": _whole(chart.critical)}, running=("cell",)),
        },
        "totals": [_numbers(total) for total in bubbles.totals],
        "classes": _classes(chart),
        "busy": _numbers(chart.timeline.busy),
        "bubble": _numbers(chart.timeline.bubble),
        "peaks": _numbers(chart.memory.peak_memory if chart.weighted else chart.memory.peak_activations),
    }


def _twin(chart: Chart, charts: Sequence[Chart]) -> int:
    twins = (
        i for i, other in enumerate(charts) if other.schedule is chart.schedule and other.measured != chart.measured
    )
    return next(twins, -1)


def _classes(chart: Chart) -> list[int]:
    """Which of `RUN_CLASSES` idle time can have here: a run has no causes that only costs tell."""
    absent = {MESSAGE, IMBALANCE} if chart.measured else {OVERHEAD, *([] if chart.p2p > 0 else [MESSAGE])}
    return [i for i in range(len(RUN_CLASSES)) if i not in absent]


def _before(chart: Chart) -> npt.NDArray[np.float64]:
    """[cells] what the rank holds when the cell begins."""
    previous = chart.timeline.dependencies.previous
    return np.where(previous >= 0, chart.cells.after[previous], 0.0)


def _whole(values: npt.NDArray[Any]) -> Steps:
    return in_steps(values)[0]


def _less(minuend: Steps, subtrahend: Steps) -> Steps:
    return Steps(minuend.values - subtrahend.values)


def _times(start: Steps, end: Steps) -> dict[str, Steps]:
    """Times as what they mostly repeat: the wait since the end before, mostly none, and the length."""
    before = np.concatenate([[0], end.values[:-1]])[: end.values.size]
    return {"wait": Steps(start.values - before), "length": _less(end, start)}


def _numbers(values: npt.NDArray[Any]) -> list[Any]:
    """The values as JSON writes them shortest: whole numbers without a point, others without digits of rounding."""
    (column,) = in_steps(values)
    exact = column.values if column.decimals == 0 else column.values / 10.0**column.decimals
    return exact.tolist()  # type: ignore[no-any-return]
