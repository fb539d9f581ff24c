"""What engines of lanes cost a step: by how much compute beside works takes longer, and what a copy engine gains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from schedc.ir.works import LANE_NAMES
from schedc.step.costs.costs import Costs
from schedc.step.costs.lanes import COPY
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks


class PricedWorks(Protocol):
    """Works with their times, which can be priced by other costs: offloads, and works among replicas."""

    @property
    def placed(self) -> PlacedWorks:
        """The works."""

    @property
    def makespan(self) -> float:
        """When the step ends, in time units."""

    def under(self, dependencies: Dependencies, costs: Costs) -> PricedWorks:
        """The same works, whose cells take the times of these costs."""


def engine_facts(offloading: PricedWorks, dependencies: Dependencies, costs: Costs) -> Iterator[dict[str, Any]]:
    """One row for each lane that works use and whose engine the costs say.

    slowed: share of the makespan that the lane's interference takes. copy_gain: share of the makespan that a copy
    engine in place of a kernel saves. Works keep their places. copy_measured: whether the costs have a figure of the
    copy engine. Without a figure, ``copy_gain`` assumes an engine that slows nothing down: no other gains more.
    """
    for lane in costs.lanes:
        if not len(offloading.placed) or LANE_NAMES.index(lane.lane) not in offloading.placed.works.lane:
            continue

        def shorter(**changes: Any) -> float:
            others = tuple(replace(x, **changes) if x.lane == lane.lane else x for x in costs.lanes)  # noqa: B023
            makespan = offloading.under(dependencies, replace(costs, lanes=others)).makespan
            return 1 - makespan / offloading.makespan if offloading.makespan else 0.0

        still = tuple((engine, 0.0) for engine, _ in lane.interference)
        row = {"lane": lane.lane, "engine": lane.engine, "interference": lane.slowdown}
        row["slowed"] = shorter(interference=still)
        if lane.engine != COPY:
            by_copies = lane.by_copies
            row["copy_gain"] = shorter(engine=COPY, interference=by_copies.interference)
            row["copy_interference"] = by_copies.slowdown
            row["copy_measured"] = COPY in dict(lane.interference)
        yield row


def engine_text(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each lane of `engine_facts`."""
    for row in rows:
        name = "a copy engine" if row["engine"] == COPY else "a kernel"
        yield (
            f"  {row['lane']} by {name}: compute beside it takes {100 * row['interference']:.4g} % longer,"
            f" which is {row['slowed']:.2%} of the step"
        )
        if "copy_gain" in row and row["copy_measured"]:
            yield f"    by a copy engine: {100 * row['copy_interference']:.4g} %; a step {row['copy_gain']:.2%} shorter"
        elif "copy_gain" in row:
            yield f"    by a copy engine that slows nothing down: a step at most {row['copy_gain']:.2%} shorter"
