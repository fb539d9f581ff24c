"""What the page knows of a schedule, as JSON: columns over cells and gaps, safe inside a script element."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.analysis.bubbles import CLASSES
from schedc.draw import palette
from schedc.draw.chart import Chart, longest
from schedc.draw.markup import plain
from schedc.ir.ops import FACTS, LETTERS, OpKind

_DIGITS = 12
"""Decimal digits that times keep, counted from the first of the largest."""

_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def page_data(charts: Sequence[Chart]) -> str:
    """One JSON object without ``<``, ``>``, ``&`` and without any character beyond ASCII.

    kinds: letter and name of each op kind, by its value; classes: names of `schedc.analysis.bubbles.CLASSES`;
    fills: the two shades of each kind; inks, phaseTints: see `schedc.draw.palette`; longest: the common time axis;
    charts: see `chart_data`.
    """
    page = {
        "kinds": [{"letter": LETTERS[kind], "name": FACTS[kind].name} for kind in OpKind],
        "classes": CLASSES,
        "fills": [palette.FILLS[kind] for kind in OpKind],
        "inks": palette.INKS,
        "phaseTints": palette.PHASES,
        "longest": longest(charts),
        "charts": [chart_data(chart) for chart in charts],
    }
    return json.dumps(page, separators=(",", ":")).translate(_ESCAPES)


def chart_data(chart: Chart) -> dict[str, Any]:
    """A chart as plain lists.

    Cells are columns ``kind``, ``stage``, ``microbatch``, ``start``, ``end``, ``phase``, ``bound``
    (`Timeline.bound_by`), ``held`` (at most, while it runs) and ``after``; of overlapped pairs also ``kind2``,
    ``stage2``, ``microbatch2`` (-1 for single ops) and ``middle``, where the second half begins. Rank r has cells
    rankStart[r] ..< rankStart[r + 1]. ``chunk`` is by pipe and stage. Gaps are columns too, and ``parts`` and
    ``totals`` are by class.
    """
    schedule, cells, bubbles = chart.schedule, chart.cells, chart.bubbles
    number = {name: i for i, name in enumerate(cells.phase_names)}
    columns: dict[str, npt.NDArray[Any]] = {
        "kind": schedule.kind[cells.first],
        "stage": schedule.stage[cells.first],
        "microbatch": schedule.microbatch[cells.first],
        "start": cells.start,
        "end": cells.end,
        "phase": cells.phase,
        "bound": chart.timeline.bound_by,
        "held": np.maximum(cells.inside, _before(chart)),
        "after": cells.after,
    }
    if (cells.second >= 0).any():
        for name in ("kind", "stage", "microbatch"):
            columns[f"{name}2"] = np.where(cells.second >= 0, getattr(schedule, name)[cells.second], -1)
        columns["middle"] = cells.middle
    return {
        "title": chart.title,
        "summary": chart.summary,
        "facts": chart.facts,
        "ranks": schedule.ranks,
        "p2p": chart.p2p,
        "makespan": _numbers(np.array([chart.timeline.makespan]))[0],
        "unit": "memory" if chart.weighted else "activations",
        "phases": [plain(name) for name in number],
        "rankStart": _numbers(cells.rank_start),
        "firstMicrobatch": list(schedule.placement.first_microbatch),
        "chunk": schedule.placement.chunk_of.tolist(),
        "cells": {name: _numbers(column) for name, column in columns.items()},
        "critical": _numbers(chart.critical),
        "gaps": {name: _numbers(getattr(bubbles, name)) for name in ("rank", "start", "end", "cell")},
        "parts": [_numbers(part) for part in bubbles.parts],
        "totals": [_numbers(total) for total in bubbles.totals],
        "busy": _numbers(chart.timeline.busy),
        "bubble": _numbers(chart.timeline.bubble),
        "peaks": _numbers(chart.memory.peak_memory if chart.weighted else chart.memory.peak_activations),
    }


def _before(chart: Chart) -> npt.NDArray[np.float64]:
    """[cells] what the rank holds when the cell begins."""
    previous = chart.timeline.dependencies.previous
    return np.where(previous >= 0, chart.cells.after[previous], 0.0)


def _numbers(values: npt.NDArray[Any]) -> list[Any]:
    """The values as JSON writes them shortest: whole numbers without a point, others without digits of rounding."""
    if not values.size or np.issubdtype(values.dtype, np.integer):
        return values.tolist()  # type: ignore[no-any-return]
    largest = float(np.abs(values).max())
    rounded = np.round(values, int(_DIGITS - np.ceil(np.log10(largest)))) if largest > 0 else values
    whole = largest < 2**53 and bool((rounded == np.trunc(rounded)).all())
    return rounded.astype(np.int64).tolist() if whole else rounded.tolist()  # type: ignore[no-any-return]
