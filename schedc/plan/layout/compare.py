"""Compares the makespan of a layout under a schedule with that of the same layers laid out by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedc.ir.arrays import Floats, Int64, bincount
from schedc.ir.placement import Placement
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.plan.layout.balancing import Balanced
from schedc.plan.layout.costs import LayerCosts
from schedc.plan.layout.even import even
from schedc.plan.layout.parts import Layout, refusal
from schedc.step.dependencies import Dependencies
from schedc.step.memory import HELD, measure_memory
from schedc.step.timeline import simulate


def peak_in_flight(schedule: Schedule) -> Int64:
    """[stages] the most microbatches in flight: from their F (or R) to their B or W, pairs counted inside.

    A stage with two copies counts the copy that holds more.
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

    load: [P] time of one microbatch on each rank, summed over its chunks. memory: [P] parameters plus peak activations.
    makespan: time of a step. work: [P] time that each rank computes in a step.
    """

    layout: Layout
    schedule: Schedule
    load: Floats
    memory: Floats
    makespan: float
    work: Floats


def measure(layout: Layout, schedule: Schedule, costs: LayerCosts) -> MeasuredLayout:
    """Simulates a layout. Raises `DiagnosticError` (S143) where the schedule has another number of stages."""
    need_stages(layout, schedule.placement, f"{schedule.name} has {schedule.stages} at these sizes")
    of_stages = costs.of(layout)
    dependencies = Dependencies.of(schedule)
    timeline = simulate(schedule, of_stages, dependencies)
    peak = measure_memory(schedule, of_stages, dependencies).peak_memory
    return MeasuredLayout(
        layout,
        schedule,
        load_per_rank(schedule.placement, costs.per_stage(layout)),
        peak + load_per_rank(schedule.placement, costs.per_stage(layout, "parameters")),
        timeline.makespan,
        timeline.busy,
    )


def need_stages(layout: Layout, placement: Placement, other: str) -> None:
    """Raises `DiagnosticError` (S143) for another number of stages than the placement's. other: says who has those."""
    if len(layout.stages) != placement.stages:
        each = f", {placement.chunks} of each rank" if placement.chunks > 1 else ""
        help = f"write a layout of {placement.stages} stages, with `|` between them{each}"
        raise refusal(f"the layout has {len(layout.stages)} stages, {other}", help)


def load_per_rank(placement: Placement, per_stage: Floats) -> Floats:
    """[P] sum of ``per_stage`` [stages] over the chunks of each rank."""
    ranks = placement.rank_of_stage
    return bincount(ranks.ravel(), np.broadcast_to(per_stage, ranks.shape).ravel(), placement.ranks).astype(float)


@dataclass(frozen=True)
class LayoutComparison:
    """A layout beside others of the same model.

    others: (name, figures) of each. by_variant: whether it was chosen among variants (`best_variant`).
    """

    chosen: MeasuredLayout
    others: tuple[tuple[str, MeasuredLayout], ...]
    by_variant: bool = False

    def gain(self, other: MeasuredLayout) -> float:
        """How much longer a step takes with the other layout, as a share of the chosen layout's makespan."""
        return other.makespan / self.chosen.makespan - 1 if self.chosen.makespan else 0.0


def compare_layouts(
    layout: Layout,
    schedule: Schedule,
    costs: LayerCosts,
    one_chunk: Schedule | None = None,
    balanced: Sequence[Balanced] = (),
    variants: Sequence[Layout] = (),
) -> LayoutComparison:
    """Compares a layout with even ones, on the same stages and on one stage per rank, and with other balanced ones.

    The even ones have one head in the last stage, and predictions that embed their tokens themselves.
    one_chunk: a schedule of one stage per rank, with the same ranks and microbatches. Without layouts, it is the way to
    run layers that the stages do not divide. variants: layouts with other heads, or another place of the embedding.
    """
    model = replace(layout.model, losses=1, embeds_first=False)
    others = [("by number, same stages", measure(even(model, schedule.stages), schedule, costs))]
    if one_chunk is not None:
        others.append(("by number, one stage per rank", measure(even(model, one_chunk.stages), one_chunk, costs)))
    for other in balanced:
        if other.layout != layout:
            what = f"balanced to {other.largest_rank:g} per rank and {other.largest_stage:g} per stage"
            others.append((what, measure(other.layout, schedule, costs)))
    others += [(variant_name(variant), measure(variant, schedule, costs)) for variant in variants]
    return LayoutComparison(measure(layout, schedule, costs), tuple(others), bool(variants))


def shortest(balanced: Sequence[Balanced], schedule: Schedule, costs: LayerCosts) -> Balanced:
    """The balanced layout with the shortest makespan under the schedule; of equal ones the first."""
    return min(balanced, key=lambda candidate: measure(candidate.layout, schedule, costs).makespan)


def variant_name(layout: Layout) -> str:
    """Says which heads a layout has, and which stage embeds the tokens of its predictions."""
    heads = "1 head" if layout.losses == 1 else f"{layout.losses} heads"
    return f"{heads}, predictions embedded in {'the first' if layout.embeds_first else 'their own'} stage"


def best_variant(
    layouts: Sequence[Layout], schedule: Schedule | None, costs: LayerCosts, *, by_memory: bool = False
) -> int:
    """Index of the layout with the shortest step under the schedule; of equal ones the first.

    by_memory: the layout whose fullest rank holds least; of equal ones that with the shortest step.
    """
    if len(layouts) == 1 or schedule is None:
        return 0
    measured = [measure(layout, schedule, costs) for layout in layouts]
    values = [(float(each.memory.max()) if by_memory else 0.0, each.makespan) for each in measured]
    return min(range(len(values)), key=values.__getitem__)
