"""The report of what a plan moves to host memory: facts as JSON, and a text made from that JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from schedc.plan.lane_engines import engine_facts, engine_text
from schedc.plan.place_works import Offloading, lane_facts
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies, reduce_by_rank
from schedc.units import plain, shown


def to_json(offloading: Offloading, dependencies: Dependencies, costs: Costs, in_bytes: bool) -> dict[str, Any]:
    """The facts. Times are in units of the costs; memory is in bytes, or in the unit of the plan's memory.

    costs: those of the stages. ``engines`` is there where they say what moves the bytes of a lane.
    """
    engines = list(engine_facts(offloading, dependencies, costs))
    gaps = dependencies.rank_start + np.arange(dependencies.rank_start.size)
    on_host = reduce_by_rank(np.maximum, offloading.placed.on_host(dependencies), gaps)
    return {
        "moved": len(offloading.placed) // 2,
        "in_bytes": in_bytes,
        "kept_free": offloading.kept_free,
        "makespan_uncapped": offloading.uncapped,
        "makespan_over_uncapped": offloading.makespan / offloading.uncapped if offloading.uncapped else 1.0,
        "peak_on_host": on_host.tolist(),
        "lanes": list(lane_facts(offloading, dependencies)),
        **({"engines": engines} if engines else {}),
    }


def to_text(facts: dict[str, Any]) -> Iterator[str]:
    """The facts for people."""
    if not facts["moved"]:
        yield "offload: nothing moves; no stage holds more than the lines keep, and every rank fits"
        return
    write = shown if facts["in_bytes"] else plain
    longer = f"{facts['makespan_over_uncapped'] - 1:.2%} longer than without"
    yield f"offload: {facts['moved']} activations move to the host and back; the step is {longer}"
    for lane in ("d2h", "h2d"):
        rows = [row for row in facts["lanes"] if row["lane"] == lane]
        exposed, busy = (sum(row[name] for row in rows) for name in ("exposed", "busy"))
        yield f"  {lane}: busy {busy:g} over {len(rows)} ranks, {exposed:g} of it exposed"
    yield from engine_text(facts.get("engines", []))
    fullest = max(range(len(facts["peak_on_host"])), key=facts["peak_on_host"].__getitem__)
    yield f"  most on the host: {write(facts['peak_on_host'][fullest])}, by rank {fullest}"
