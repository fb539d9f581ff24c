"""What ranks hold in a step without works: parameters, activations, slots of hot experts, rows of what runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Floats, repeat
from schedc.ir.plan import Plan
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.plan.activation_memory import MOE, StageActivations
from schedc.plan.carried_memory import carried_memory
from schedc.plan.counts.layers import moe_layer
from schedc.plan.directives.base import Directives
from schedc.plan.layout.compare import load_per_rank
from schedc.plan.layout.costs import LayerCosts
from schedc.plan.layout.parts import Layout
from schedc.step.costs.costs import Costs, StageCosts
from schedc.step.dependencies import Dependencies, reduce_by_rank
from schedc.step.memory import memory_changes


@dataclass(frozen=True)
class HotSlots:
    """The most that hot experts take, in bytes.

    in_flight: [stages] weights in the MoE layers of the stage, for each microbatch in flight: by microbatch. kept:
    [stages] weights and the sums of their gradients, for a whole step: by step. passing: gradients of one layer, or by
    step of two, on their way to the owners.
    """

    in_flight: Floats
    kept: Floats
    passing: float

    def kept_per_rank(self, schedule: Schedule) -> Floats:
        """[P] what each rank keeps for a step."""
        return load_per_rank(schedule.placement, self.kept)

    def held(self, schedule: Schedule) -> Floats:
        """[P] the most that each rank holds at once."""
        nothing = Costs(F=0.0, activation=0.0, pending_weight=0.0).resolved(schedule.stages)
        return self.kept_per_rank(schedule) + _most(running_memory(schedule, nothing, self.in_flight), schedule)


def hot_slots(plan: Plan, layout: Layout) -> HotSlots:
    """The memory of copies of experts: 0 where a plan has none, does not say their sizes, or has a capacity."""
    none = np.zeros(len(layout.stages))
    if (plan.hot is None and plan.balance is None) or plan.experts is None or plan.capacity is not None:
        return HotSlots(none, none, 0.0)
    own = plan.experts.count // plan.topology.ranks if plan.topology else 0
    if plan.balance is not None and plan.topology is not None:
        most = plan.balance.copies(own, plan.balance.peers(plan.topology.nodes, plan.topology.per_node))
    else:
        most = own if plan.hot is None or plan.hot.most is None else plan.hot.most
    layer = moe_layer(plan, plan.experts)
    weights, sums = float(most * layer.slot_bytes), float(most * layer.slot_gradient_bytes)
    layers = layout.counts[:, MOE].sum(1)
    if plan.copies_by_microbatch:
        return HotSlots(weights * layers, none, sums * float(layers.any()))
    return HotSlots(none, (weights + sums) * layers, sums * float(min(2, layers.max(initial=0))))


@dataclass(frozen=True, eq=False)
class HeldMemory:
    """What ranks hold in a step without works, in the unit of the plan's memory.

    costs: those of the stages. slots: hot experts; they count where memory is in bytes. carried: [ops] what segments of
    sequences add beside activations, likewise.
    """

    plan: Plan
    layout: Layout
    layers: LayerCosts
    schedule: Schedule
    costs: Costs
    slots: HotSlots
    carried: Floats

    @cached_property
    def of_stage(self) -> StageCosts:
        return self.costs.resolved(self.schedule.stages)

    @cached_property
    def activations(self) -> StageActivations:
        """What a microbatch holds on the stages."""
        return StageActivations(self.plan, self.layout, self.layers.activations)

    @cached_property
    def running(self) -> Floats:
        """[P] rows of the microbatch that runs, on the stage of each rank where they take most.

        They count where recomputation is adaptive, and all rows come to one rank. In an overlapped pair two
        microbatches run, one of them backward.
        """
        worst, stages = self.activations.worst, self.schedule.placement.stage_of_chunk
        whole = (self.activations.whole + worst.waiting)[:, MOE].sum(1)
        microbatches = 2 if (self.schedule.pair >= 0).any() else 1
        running = np.where(worst.waiting.any(1), whole + microbatches * worst.passing, 0.0)
        return np.asarray(np.where(stages >= 0, running[stages], 0.0).max(1))

    @cached_property
    def standing(self) -> Floats:
        """[P] what each rank holds for a whole step: all but activations and slots in flight."""
        parameters = load_per_rank(self.schedule.placement, self.layers.per_stage(self.layout, "parameters"))
        slots = self.slots.passing + self.slots.kept_per_rank(self.schedule)
        return np.asarray(parameters + slots + self.running)

    @cached_property
    def after(self) -> Floats:
        """[ops] activations and slots behind each op; in a pair the forward counts first."""
        return running_memory(self.schedule, self.of_stage, self.slots.in_flight) + summed(self.carried, self.schedule)

    @cached_property
    def inside(self) -> Floats:
        """[ops] the most activations and slots inside each op: before it or after it."""
        before = np.concatenate([[0.0], self.after[:-1]])
        starts = self.schedule.rank_start[:-1]
        before[starts[starts < self.after.size]] = 0.0
        return np.asarray(np.maximum(before, self.after))

    def in_cells(self, dependencies: Dependencies) -> Floats:
        """[cells] the most activations and slots inside each cell; dependencies: those of the schedule."""
        held = self.inside[dependencies.first]
        pairs = np.flatnonzero(dependencies.pairs)
        held[pairs] = np.maximum(held[pairs], self.inside[dependencies.second[pairs]])
        return held

    def peaks(self, away: Floats | float = 0.0) -> Floats:
        """[P] the most of each rank. away: [ops] memory that works have moved to the host while each op runs."""
        return np.asarray(self.standing + _most(self.inside - away, self.schedule))


def held_memory(
    directives: Directives, plan: Plan, layout: Layout, layers: LayerCosts, schedule: Schedule, costs: Costs
) -> HeldMemory:
    """What ranks hold under a plan, in the unit of its memory, or of its host where it says no memory."""
    memory, host = directives.tree.memory, plan.host
    sized = bool(memory.unit) if memory is not None else host is not None and host.in_bytes
    counted = plan if sized else Plan()
    slots, carried = hot_slots(counted, layout), carried_memory(counted, layout, schedule)
    return HeldMemory(plan, layout, layers, schedule, costs, slots, carried)


def _most(running: Floats, schedule: Schedule) -> Floats:
    """[P] the most of each rank. running: [ops] of `running_memory`."""
    return np.asarray(np.maximum(reduce_by_rank(np.maximum, running, schedule.rank_start), 0.0))


def most_held(schedule: Schedule, held: Floats, restored: Floats) -> Floats:
    """[P] the most that each rank holds of what a microbatch holds on a stage.

    held: [stages] from the forward on. restored: [stages] behind an R, and between I and W.
    """
    columns = tuple(held.tolist()), tuple(restored.tolist())
    costs = Costs(F=0.0, activation=columns[0], pending_weight=columns[1], recomputed=columns[0], restored=columns[1])
    stages = costs.resolved(schedule.stages)
    return _most(running_memory(schedule, stages, np.zeros(schedule.stages)), schedule)


def running_memory(schedule: Schedule, costs: StageCosts, slots: Floats) -> Floats:
    """[ops] activations and slots that the rank holds after each op; in a pair the forward counts first.

    slots: [stages] for each microbatch in flight.
    """
    recomputed = recomputed_ops(schedule)
    changes = memory_changes(
        costs.activation + slots, costs.pending_weight, costs.recomputed + slots, costs.restored + slots
    )
    return summed(changes[recomputed.astype(np.int8), schedule.kind, schedule.stage], schedule)


def summed(added: Floats, schedule: Schedule) -> Floats:
    """[ops] what a rank holds after each op, of what each op adds: [ops]."""
    total = np.cumsum(added)
    start = schedule.rank_start[:-1]
    before = np.where(start > 0, total[np.maximum(start, 1) - 1], 0.0)
    return np.asarray(total - repeat(before, np.diff(schedule.rank_start)))
