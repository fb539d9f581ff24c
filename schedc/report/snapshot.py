"""The report of a state that every rank copies to the host beside a step: facts as JSON, and a text made from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from schedc.compiler import Analysis
from schedc.ir.arrays import bincount
from schedc.ir.works import WorkKind
from schedc.step.placed_works import PlacedWorks
from schedc.step.timeline import CellTimes
from schedc.step.work_runs import StepWorks
from schedc.step.works.place_snapshots import evenly_held, snapshot_price
from schedc.units import shown

_MILLISECONDS = 1000.0


def to_json(analysis: Analysis, size: float, speed: float) -> dict[str, Any]:
    """The facts. Times are in milliseconds, as those of the costs are taken to be.

    size: bytes of the state of each rank, divided evenly between its stages. speed: bytes per second.
    ``longer``: time that the step takes more.
    """
    dependencies = analysis.dependencies
    step: StepWorks | None = analysis.placed
    if step is None:
        cells = CellTimes.of(dependencies, analysis.costs.resolved(dependencies.schedule.stages))
        step = StepWorks(PlacedWorks.none(), np.zeros(0), cells, True)
    price = snapshot_price(step, evenly_held(dependencies, size), _MILLISECONDS / speed)
    placed = price.step.placed
    own = placed.works.kind == WorkKind.SNAPSHOT
    rank = placed.rank_of(placed.start, dependencies)
    return {
        "bytes": size,
        "speed": speed,
        "pieces": bincount(rank[own], minlength=price.bytes.size).tolist(),
        "fits": price.fits.tolist(),
        "exposed": price.exposed.tolist(),
        "longer": price.longer,
    }


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """The facts for people: the rank with the largest exposed part."""
    exposed = facts["exposed"]
    worst = max(range(len(exposed)), key=exposed.__getitem__)
    size, speed = shown(facts["bytes"]), shown(facts["speed"])
    yield f"snapshot: each rank copies {size} at {speed}/s, rank {worst} in {facts['pieces'][worst]} pieces"
    if exposed[worst] <= facts["bytes"] * 1e-9:
        yield "  all of it fits beside the step"
        return
    parts = f"{shown(facts['fits'][worst])} fit beside the step, {shown(exposed[worst])} are exposed"
    yield f"  rank {worst}: {parts}; the step takes {facts['longer']:g} ms more"
