"""Checks the ranks against the memory of a plan: what each holds at its peak, and what fills the fullest rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.memory import memory_changes
from schedc.analysis.placed_works import PlacedWorks
from schedc.attachments.layer_counts import is_sized
from schedc.attachments.recompute_bytes import slot_bytes, slot_gradient_bytes
from schedc.attachments.row_counts import worst_case_rows
from schedc.attachments.units import amount, plain, shown
from schedc.attachments.values import Attachments
from schedc.cost.costs import Costs, StageCosts
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import Floats, reduceat, repeat
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.ir.works import WorkKind
from schedc.layout.compare import load_per_rank
from schedc.layout.costs import LayerCosts
from schedc.layout.parts import WORK, Layout, PartKind
from schedc.plan.activation_memory import MOE, held_by_kind, worst_routing
from schedc.source import NOWHERE
from schedc.syntax.plan import MemoryLine, PlanTree

_RUNNING_ROWS = "the rows of the microbatch that runs"


@dataclass(frozen=True)
class Peak:
    """The peak of a rank.

    held: memory at the peak. row: the op there, as a row of the schedule. parts: (what it is
    for, memory), largest first.
    """

    rank: int
    held: float
    row: int
    parts: tuple[tuple[str, float], ...]


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


@dataclass(frozen=True)
class ExtraMemory:
    """Memory of ranks besides parameters and activations, in the unit of the plan's memory.

    slots: hot experts. running: [stages] rows of the microbatch that runs, where recomputation is adaptive and all rows
    come to one rank.
    """

    slots: HotSlots
    running: Floats

    def running_per_rank(self, schedule: Schedule) -> Floats:
        """[P] rows of the microbatch that runs, on the stage of each rank where they take most."""
        stages = schedule.placement.stage_of_chunk
        return np.asarray(np.where(stages >= 0, self.running[stages], 0.0).max(1))


@dataclass(frozen=True)
class Sharded:
    """Dense parameters that replicas shard, in the unit of the plan's memory.

    weights: [stages] whole weights. freed: [stages] memory that a replica does not hold between the uses of a stage.
    """

    weights: Floats
    freed: Floats

    def per_rank(self, schedule: Schedule) -> Floats:
        """[P] memory that each rank does not hold."""
        return load_per_rank(schedule.placement, self.freed)


def extra_memory(
    plan: Attachments, layout: Layout, activations: tuple[float, ...], schedule: Schedule, sized: bool
) -> ExtraMemory:
    """The extra memory of a plan. sized: whether memory is in bytes; slots count only then.

    In an overlapped pair two microbatches run, one of them backward.
    """
    slots = hot_slots(plan if sized else Attachments(), layout)
    worst = worst_routing(plan, layout, activations)
    adaptive = worst.waiting.any(1)
    whole = (held_by_kind(Attachments(), layout, activations) + worst.waiting)[:, MOE].sum(1)
    microbatches = 2 if (schedule.pair >= 0).any() else 1
    return ExtraMemory(slots, np.where(adaptive, whole + microbatches * worst.passing, 0.0))


def hot_slots(plan: Attachments, layout: Layout) -> HotSlots:
    """The memory of a plan's hot experts: 0 where it has none, does not say their sizes, or has a capacity."""
    none = np.zeros(len(layout.stages))
    if plan.hot is None or plan.experts is None or plan.capacity is not None:
        return HotSlots(none, none, 0.0)
    own = plan.experts.count // plan.topology.ranks if plan.topology else 0
    most = own if plan.hot.most is None else plan.hot.most
    weights, sums = float(most * slot_bytes(plan.experts, plan.dtype)), float(most * slot_gradient_bytes(plan.experts))
    layers = layout.counts[:, MOE].sum(1)
    if plan.hot.by_microbatch:
        return HotSlots(weights * layers, none, weights * float(layers.any()))
    return HotSlots(none, (weights + sums) * layers, sums * float(min(2, layers.max(initial=0))))


def rank_peaks(
    layout: Layout,
    layers: LayerCosts,
    schedule: Schedule,
    costs: Costs,
    extra: ExtraMemory,
    away: Floats | float = 0.0,
) -> Floats:
    """[P] the peak of each rank: its parameters, activations inside cells, and extra memory.

    away: [ops] memory that works have moved to the host while each op runs.
    """
    running = held_inside(schedule, costs.resolved(schedule.stages), extra.slots.in_flight) - away
    return np.asarray(standing_memory(layout, layers, schedule, extra) + _most(running, schedule))


def standing_memory(layout: Layout, layers: LayerCosts, schedule: Schedule, extra: ExtraMemory) -> Floats:
    """[P] what each rank holds for a whole step: all but activations and what goes with them."""
    parameters = load_per_rank(schedule.placement, layers.per_stage(layout, "parameters"))
    slots = extra.slots.passing + extra.slots.kept_per_rank(schedule)
    return np.asarray(parameters + slots + extra.running_per_rank(schedule))


def _most(running: Floats, schedule: Schedule) -> Floats:
    """[P] the most of each rank. running: [ops] of `running_memory`."""
    if not running.size:
        return np.zeros(schedule.ranks)
    return np.asarray(np.maximum(reduceat(np.maximum, running, schedule.rank_start[:-1]), 0.0))


def held_inside(schedule: Schedule, costs: StageCosts, slots: Floats) -> Floats:
    """[ops] the most activations and slots inside each op: before it or after it. Arguments as for `running_memory`."""
    after = running_memory(schedule, costs, slots)
    before = np.concatenate([[0.0], after[:-1]])
    starts = schedule.rank_start[:-1]
    before[starts[starts < after.size]] = 0.0
    return np.asarray(np.maximum(before, after))


def running_memory(schedule: Schedule, costs: StageCosts, slots: Floats) -> Floats:
    """[ops] activations and slots that the rank holds after each op; in a pair the forward counts first.

    slots: [stages] for each microbatch in flight.
    """
    recomputed = recomputed_ops(schedule)
    changes = memory_changes(
        costs.activation + slots, costs.pending_weight, costs.recomputed + slots, costs.restored + slots
    )
    added = changes[recomputed.astype(np.int8), schedule.kind, schedule.stage]
    total = np.cumsum(added)
    start = schedule.rank_start[:-1]
    before = np.where(start > 0, total[np.maximum(start, 1) - 1], 0.0)
    return np.asarray(total - repeat(before, np.diff(schedule.rank_start)))


def peak_of(
    rank: int,
    plan: Attachments,
    layout: Layout,
    layers: LayerCosts,
    schedule: Schedule,
    costs: Costs,
    extra: ExtraMemory,
    away: Away | None = None,
    sharded: Sharded | None = None,
) -> Peak:
    """The peak of ``rank`` with its parts."""
    parameters = held_by_kind(Attachments(), layout, layers.parameters)
    activations = held_by_kind(plan, layout, layers.activations)
    of_stage, recomputed = costs.resolved(schedule.stages), recomputed_ops(schedule)
    low, high = schedule.rank_start[rank : rank + 2]
    held_there = held_inside(schedule, of_stage, extra.slots.in_flight) - (0.0 if away is None else away.of_ops)
    row = int(low + np.argmax(held_there[low:high]))
    stages = [int(stage) for stage in schedule.placement.stage_of_chunk[rank] if stage >= 0]
    slots = extra.slots.passing + float(extra.slots.kept_per_rank(schedule)[rank])
    parts = {"slots of hot experts": slots, _RUNNING_ROWS: float(extra.running_per_rank(schedule)[rank])}
    for stage in stages:
        freed = 0.0 if sharded is None else float(sharded.freed[stage])
        _add(parts, "parameters of", parameters[stage], float(parameters[stage].sum()) - freed)
        own = low + np.flatnonzero(schedule.stage[low : row + 1] == stage)
        number = {kind: int((schedule.kind[own] == kind).sum()) for kind in OpKind}
        in_flight = number[OpKind.F] - number[OpKind.I] - number[OpKind.B]
        unsaved = int((recomputed[own] & (schedule.kind[own] == OpKind.F)).sum()) - number[OpKind.R]
        restored = number[OpKind.R] - int((recomputed[own] & BACKWARD[schedule.kind[own]]).sum())
        pending = number[OpKind.I] - number[OpKind.W]
        held = (in_flight - unsaved - restored) * of_stage.activation[stage]
        held += unsaved * of_stage.recomputed[stage] + restored * of_stage.restored[stage]
        held -= 0.0 if away is None else away.of_stage(row, stage)
        _add(parts, "activations of", activations[stage], held)
        parts["slots of hot experts"] += in_flight * float(extra.slots.in_flight[stage])
        parts["deferred weight gradients"] = (
            parts.get("deferred weight gradients", 0.0) + pending * of_stage.pending_weight[stage]
        )
    parts |= {} if away is None else away.of_replicas(row, rank)
    order = sorted(((name, value) for name, value in parts.items() if value > 0), key=lambda part: -part[1])
    return Peak(rank, sum(value for _, value in order), row, tuple(order))


def _add(parts: dict[str, float], what: str, weights: Floats, held: float) -> None:
    """Adds the memory of a stage to ``parts``, divided over the kinds of its parts by ``weights`` [kinds]."""
    if (whole := float(weights.sum())) <= 0:
        parts[f"{what} stages"] = parts.get(f"{what} stages", 0.0) + held
        return
    for kind, weight in zip(WORK, weights.tolist(), strict=True):
        name = f"{what} {_PLURAL.get(kind, kind)}"
        parts[name] = parts.get(name, 0.0) + held * weight / whole


_PLURAL = {
    PartKind.DENSE: "dense layers",
    PartKind.MOE: "MoE layers",
    PartKind.MTP: "predictions",
    PartKind.EMBEDDING: "the embedding",
    PartKind.HEAD: "the head",
}


_OF_REPLICAS = {
    "whole parameters": (WorkKind.GATHER, WorkKind.DROP),
    "gradient buckets": (WorkKind.SCATTER, WorkKind.SPREAD),
}
"""What works among replicas hold on the device, and the works that it follows from."""


@dataclass(frozen=True, eq=False)
class Away:
    """What placed works have moved to the host, by op and by stage."""

    placed: PlacedWorks
    dependencies: Dependencies

    @cached_property
    def of_ops(self) -> Floats:
        """[ops] memory on the host while each op runs."""
        return np.asarray(self.placed.away(self.dependencies)[self.dependencies.cell_of])

    def between(self, costs: Costs, extra: ExtraMemory) -> Floats:
        """[P] the most of activations, slots and what works hold between the cells of each rank."""
        schedule = self.dependencies.schedule
        after = running_memory(schedule, costs.resolved(schedule.stages), extra.slots.in_flight)
        last = np.maximum(self.dependencies.first, self.dependencies.second)
        return self.placed.peaks_between(self.dependencies, after[last])

    def of_replicas(self, row: int, rank: int) -> dict[str, float]:
        """What works among replicas hold on a rank while the op of a row runs, by what it is for."""
        cell = self.dependencies.cell_of[row]
        here = self.placed.only(self.placed.rank_of(self.placed.start, self.dependencies) == rank)
        return {
            name: -float(here.of_kinds(*kinds).away(self.dependencies)[cell]) for name, kinds in _OF_REPLICAS.items()
        }

    def of_stage(self, row: int, stage: int) -> float:
        """Memory of one stage on the host while the op of a row runs."""
        part = self.placed.of_activations
        part = part.only(part.works.stage == stage)
        return float(part.away(self.dependencies)[self.dependencies.cell_of[row]])


def check_memory(
    tree: PlanTree,
    plan: Attachments,
    layout: Layout,
    layers: LayerCosts,
    dependencies: Dependencies,
    costs: Costs,
    placed: PlacedWorks | None = None,
    chosen: bool = False,
    sharded: Sharded | None = None,
) -> Floats | None:
    """[P] bytes that each rank holds at its peak; None for a plan whose memory has no unit.

    Raises `DiagnosticError` (S406) where a rank holds more than the plan's memory, with what fills the fullest rank.

    costs: those of the stages, with the activations that recomputation leaves. placed: works that move activations.
    chosen: the levels are those that hold least, because no others fit. sharded: what replicas shard.
    """
    line = tree.memory
    if line is None:
        return None
    _check_worst(tree, plan, line)
    schedule, limit = dependencies.schedule, amount(line)
    extra = extra_memory(plan, layout, layers.activations, schedule, bool(line.unit))
    away = None if placed is None else Away(placed, dependencies)
    held = rank_peaks(layout, layers, schedule, costs, extra, 0.0 if away is None else away.of_ops)
    if away is not None:
        held = np.maximum(held, standing_memory(layout, layers, schedule, extra) + away.between(costs, extra))
    held = held if sharded is None else held - sharded.per_rank(schedule)
    rank = int(np.argmax(held))
    if held[rank] <= limit * (1 + 1e-12):
        return held if line.unit else None
    write = shown if line.unit else plain
    peak = peak_of(rank, plan, layout, layers, schedule, costs, extra, away, sharded)
    op = schedule.op(peak.row)
    name = f"{op.stage}{op.kind.name}{op.microbatch}"
    message = f"rank {rank} holds {write(held[rank], up=True)} at {name}, and the plan allows {write(limit)}"
    notes = tuple(_notes(peak, schedule, write))
    notes = (*notes, "`recompute auto` has no levels that hold less") if chosen else notes
    less = "" if plan.offload else "`offload auto` to a `host`, "
    less += "" if chosen else _recompute_help(plan, peak)
    help = f"allow {write(held[rank], up=True)}, say `at auto`, {less}or use a schedule that holds fewer microbatches"
    raise DiagnosticError([Diagnostic("S406", message, Label(line.span), notes=notes, help=help, source=tree.source)])


def _notes(peak: Peak, schedule: Schedule, write: Callable[[float], str]) -> Iterator[str]:
    yield "most of it: " + ", ".join(f"{name} {write(value)}" for name, value in peak.parts[:3])
    span = schedule.spans[schedule.span[peak.row]]
    if schedule.source is not None and span != NOWHERE:
        yield f"that op is written at {schedule.source.place}:{span}"


def _recompute_help(plan: Attachments, peak: Peak) -> str:
    names = [name for name, _ in peak.parts[:3]]
    moe = any(name.startswith("activations of MoE") for name in names)
    less = "`recompute` more, " if moe and plan.experts and plan.experts.width else ""
    less = "leave out `in bubbles`, " if any(level.bubbles for level in plan.recompute) else less
    return f"{less}give experts a `capacity`, " if _RUNNING_ROWS in names and plan.capacity is None else less


def _check_worst(tree: PlanTree, plan: Attachments, line: MemoryLine) -> None:
    """S146: a memory and adaptive levels, where the plan does not say how many rows may come to a rank."""
    if not any(level.adaptive is not None for level in plan.recompute) or (is_sized(plan) and worst_case_rows(plan)):
        return
    message = "the memory and `adaptive`: how many rows may come to a rank is not known"
    help = "write `experts ... width F hidden H` and `topology nodes N x G`; with a `capacity`, `tokens` too"
    raise DiagnosticError([Diagnostic("S146", message, Label(line.span), help=help, source=tree.source)])
