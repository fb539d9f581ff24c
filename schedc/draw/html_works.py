"""The works of a chart as data of the page: names and legend, and a table with a row per work."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedc.draw import palette
from schedc.draw.html_columns import Packer, in_steps
from schedc.draw.work_lanes import legend_texts
from schedc.ir.works import KIND_NAMES, LANE_NAMES, WorkLane
from schedc.step.work_runs import WorkRuns
from schedc.units import plain, shown


def work_facts(works: WorkRuns | None) -> dict[str, Any]:
    """Names of kinds and lanes, fills by lane, legend, and what the column ``size`` counts in; empty without works."""
    if works is None:
        return {}
    write = shown if works.in_bytes else plain
    facts = {
        "kinds": KIND_NAMES,
        "lanes": LANE_NAMES,
        "fills": [palette.LANES[lane] for lane in WorkLane],
        "legend": [(palette.LANES[lane], text) for lane, text in legend_texts(works)],
        "sizes": [write(float(size)) for size in np.unique(works.works.bytes)],
    }
    return {"works": facts}


def work_table(works: WorkRuns | None, packer: Packer) -> dict[str, Any]:
    """The table ``works``, in order of rank, lane and time; empty without works.

    ``size`` is the number of the bytes in the list ``sizes``. ``begin``, ``finish``, ``exposed``: time units.
    """
    if works is None:
        return {}
    order = np.lexsort((works.times.begin, works.works.lane, works.rank))
    columns: dict[str, Any] = {name: getattr(works.works, name) for name in ("kind", "lane", "stage", "microbatch")}
    columns |= {"rank": works.rank, "size": np.unique(works.works.bytes, return_inverse=True)[1]}
    table = {name: in_steps(column[order])[0] for name, column in columns.items()}
    times = in_steps(*(getattr(works.times, name)[order] for name in ("begin", "finish", "exposed")))
    table |= dict(zip(("begin", "finish", "exposed"), times, strict=True))
    return {"works": packer.table(table, running=("rank",))}
