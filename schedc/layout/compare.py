"""What a layout gains: its makespan under a schedule beside those of the same layers laid out by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.memory import HELD, measure_memory
from schedc.analysis.timeline import simulate
from schedc.ir.arrays import Floats, Int64, bincount
from schedc.ir.placement import Placement
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.layout.balancing import Balanced
from schedc.layout.costs import LayerCosts
from schedc.layout.even import even
from schedc.layout.parts import Layout, refusal
from schedc.layout.writer import write_layout


def peak_in_flight(schedule: Schedule) -> Int64:
    """[stages] microbatches that a stage holds at its peak, from their F (or R) to their B or W, inside pairs.

    Where a stage has two copies, that of the copy which holds more.
    """
    change = HELD[recomputed_ops(schedule).astype(np.int8), schedule.kind]
    order = np.lexsort((np.arange(len(schedule)), schedule.rank, schedule.stage))
    held = np.cumsum(change[order])  # every copy ends at 0
    most = np.zeros(schedule.stages, np.int64)
    np.maximum.at(most, schedule.stage[order], held)
    return most


@dataclass(frozen=True)
class MeasuredLayout:
    """A layout under a schedule, in the units of the layer costs.

    load: [P] time of one microbatch on each rank, the sum of its chunks. memory: [P] parameters and the peak of the
    activations. makespan: of a step. work: [P] what each rank computes in a step.
    """

    layout: Layout
    schedule: Schedule
    load: Floats
    memory: Floats
    makespan: float
    work: Floats


def measure(layout: Layout, schedule: Schedule, costs: LayerCosts) -> MeasuredLayout:
    """Simulate. Raises `DiagnosticError` (S143) for a layout with another number of stages than the schedule."""
    if len(layout.stages) != schedule.stages:
        raise refusal(
            f"the layout has {len(layout.stages)} stages, {schedule.name} has {schedule.stages} at these sizes",
            f"{schedule.ranks} ranks with {schedule.placement.chunks} chunks each",
        )
    of_stages = costs.of(layout)
    known = Dependencies.of(schedule)
    timeline = simulate(schedule, of_stages, known)
    peak = measure_memory(schedule, of_stages, known).peak_memory
    return MeasuredLayout(
        layout,
        schedule,
        load_per_rank(schedule.placement, costs.per_stage(layout)),
        peak + load_per_rank(schedule.placement, costs.per_stage(layout, "parameters")),
        timeline.makespan,
        timeline.busy,
    )


def load_per_rank(placement: Placement, per_stage: Floats) -> Floats:
    """[P] the sum over the chunks of each rank."""
    ranks = placement.rank_of_stage
    return bincount(ranks.ravel(), np.broadcast_to(per_stage, ranks.shape).ravel(), placement.ranks).astype(float)


@dataclass(frozen=True)
class LayoutComparison:
    """A layout and others of the same model. ``others``: what each is, and its figures."""

    chosen: MeasuredLayout
    others: tuple[tuple[str, MeasuredLayout], ...]

    def gain(self, other: MeasuredLayout) -> float:
        """How much longer a step takes with the other, as a share of that with the chosen layout."""
        return other.makespan / self.chosen.makespan - 1 if self.chosen.makespan else 0.0


def compare(
    layout: Layout,
    schedule: Schedule,
    costs: LayerCosts,
    one_chunk: Schedule | None = None,
    balanced: Sequence[Balanced] = (),
) -> LayoutComparison:
    """Set a layout beside the even ones, on the same stages and on one stage per rank, and beside other balanced ones.

    one_chunk: a schedule of one stage per rank, at the same ranks and microbatches: what is left to run layers that do
    not divide by the stages where stages of different sizes are not allowed.
    """
    model = layout.model
    others = [("by number, same stages", measure(even(model, schedule.stages), schedule, costs))]
    if one_chunk is not None:
        others.append(("by number, one stage per rank", measure(even(model, one_chunk.stages), one_chunk, costs)))
    for other in balanced:
        if other.layout != layout:
            what = f"balanced to {other.largest_rank:g} per rank and {other.largest_stage:g} per stage"
            others.append((what, measure(other.layout, schedule, costs)))
    return LayoutComparison(measure(layout, schedule, costs), tuple(others))


def shortest(balanced: Sequence[Balanced], schedule: Schedule, costs: LayerCosts) -> Balanced:
    """The one whose step is shortest under the schedule; of several the first."""
    return min(balanced, key=lambda one: measure(one.layout, schedule, costs).makespan)


def measured_json(measured: MeasuredLayout) -> dict[str, Any]:
    """The figures as JSON."""
    return {
        "layout": write_layout(measured.layout),
        "schedule": measured.schedule.name,
        "stages": len(measured.layout.stages),
        "load": measured.load.tolist(),
        "memory": measured.memory.tolist(),
        "makespan": measured.makespan,
        "work": measured.work.tolist(),
    }
