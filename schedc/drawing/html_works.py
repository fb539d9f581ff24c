"""Works and copies of a chart as data of the page: names and legend, and a table with a row per work and copy."""

from __future__ import annotations

from typing import Any

from schedc.drawing import palette
from schedc.drawing.beside import JOINED, KINDS, LANES, Beside
from schedc.drawing.html_columns import Packer, in_steps


def work_facts(beside: Beside | None) -> dict[str, Any]:
    """Names of kinds and lanes, fills by lane, legend, and what ``size`` counts in; empty without works and copies.

    ``joined``: how many kinds have a JOIN between cells. They are the first ones.
    """
    if beside is None:
        return {}
    facts = {
        "kinds": KINDS,
        "joined": JOINED,
        "lanes": LANES,
        "fills": [palette.LANES[lane] for lane in LANES],
        "legend": [(palette.LANES[LANES[lane]], text) for lane, text in beside.legend()],
        "sizes": beside.sizes,
    }
    return {"works": facts}


def work_table(beside: Beside | None, packer: Packer) -> dict[str, Any]:
    """The table ``works``, in order of rank, lane and time; empty without works and copies.

    ``size`` is the number of the bytes in the list ``sizes``. ``begin``, ``finish``, ``exposed``: time units.
    """
    if beside is None:
        return {}
    whole = ("kind", "lane", "stage", "microbatch", "layer", "rank", "size")
    table = {name: in_steps(getattr(beside, name))[0] for name in whole}
    times = in_steps(*(getattr(beside, name) for name in ("begin", "finish", "exposed")))
    table |= dict(zip(("begin", "finish", "exposed"), times, strict=True))
    return {"works": packer.table(table, running=("rank",))}
