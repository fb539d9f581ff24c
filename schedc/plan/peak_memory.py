"""Checks the ranks against the memory of a plan: what each holds at its peak, and what fills the fullest rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import Floats
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.plan import Plan
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.ir.works import WorkKind
from schedc.plan.activation_memory import held_by_kind
from schedc.plan.counts.layers import counted_layer
from schedc.plan.counts.rows import worst_case_rows
from schedc.plan.held_memory import HeldMemory
from schedc.plan.layout.compare import load_per_rank
from schedc.plan.layout.parts import KIND_NAMES, WORK
from schedc.plan.working_memory import working_of_ops
from schedc.source import NOWHERE
from schedc.step.dependencies import Dependencies
from schedc.step.memory import RankBytes
from schedc.step.placed_works import PlacedWorks
from schedc.syntax.plan import MemoryLine, PlanTree
from schedc.units import amount, plain, shown

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
class Sharded:
    """Dense parameters that replicas shard, in the unit of the plan's memory.

    weights: [stages] whole weights. freed: [stages] memory that a replica does not hold between the uses of a stage.
    """

    weights: Floats
    freed: Floats

    def per_rank(self, schedule: Schedule) -> Floats:
        """[P] memory that each rank does not hold."""
        return load_per_rank(schedule.placement, self.freed)


def peak_of(
    rank: int,
    plan: Plan,
    held: HeldMemory,
    away: Away | None = None,
    sharded: Sharded | None = None,
) -> Peak:
    """The peak of ``rank`` with its parts. held: what ranks hold without works."""
    schedule, extra, of_stage = held.schedule, held.extra, held.of_stage
    parameters = held_by_kind(Plan(), held.layout, held.layers.parameters)
    activations = held_by_kind(plan, held.layout, held.layers.activations)
    recomputed = recomputed_ops(schedule)
    low, high = schedule.rank_start[rank : rank + 2]
    held_there = held.inside - (0.0 if away is None else away.of_ops)
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
        own_held = (in_flight - unsaved - restored) * of_stage.activation[stage]
        own_held += unsaved * of_stage.recomputed[stage] + restored * of_stage.restored[stage]
        own_held -= 0.0 if away is None else away.of_stage(row, stage)
        _add(parts, "activations of", activations[stage], own_held)
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
        name = f"{what} {KIND_NAMES[kind]}"
        parts[name] = parts.get(name, 0.0) + held * weight / whole


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

    def between(self, held: HeldMemory) -> Floats:
        """[P] the most of activations, slots and what works hold between the cells of each rank.

        In a gap all offloads are joined before fetches start. So offloads alone hold the most in front of a gap or
        behind it, which is in a cell, and this gives 0 for them.
        """
        if self.placed.moves_activations_alone:
            return np.zeros(held.schedule.ranks)
        last = np.maximum(self.dependencies.first, self.dependencies.second)
        return self.placed.peaks_between(self.dependencies, held.after[last])

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
    plan: Plan,
    held: HeldMemory,
    dependencies: Dependencies,
    placed: PlacedWorks | None = None,
    chosen: bool = False,
    sharded: Sharded | None = None,
) -> RankBytes | None:
    """The bytes of ranks; None for a plan whose memory has no unit.

    Raises `DiagnosticError` (S406) where a rank holds more than the plan's memory, with what fills the fullest rank.

    held: what ranks hold without works, with the activations that recomputation leaves. placed: works that move
    activations. chosen: the levels are those that hold least, because no others fit. sharded: what replicas shard.
    """
    line = tree.memory
    if line is None:
        return None
    _check_worst(tree, plan, line)
    schedule, limit = dependencies.schedule, amount(line.limit, line.unit)
    away = None if placed is None else Away(placed, dependencies)
    peaks = held.peaks(0.0 if away is None else away.of_ops)
    if away is not None:
        peaks = np.maximum(peaks, held.standing + away.between(held))
    elsewhere = 0.0 if sharded is None else sharded.per_rank(schedule)
    peaks = peaks - elsewhere
    rank = int(np.argmax(peaks))
    if peaks[rank] <= limit * (1 + 1e-12):
        if not line.unit:
            return None
        working = working_of_ops(plan, held.layout, held.layers, held.of_stage, dependencies)
        if working is None:
            return RankBytes(peaks, None)
        inside = held.peaks((0.0 if away is None else away.of_ops) - working) - elsewhere
        return RankBytes(peaks, np.maximum(peaks, inside))
    write = shown if line.unit else plain
    peak = peak_of(rank, plan, held, away, sharded)
    op = schedule.op(peak.row)
    name = f"{op.stage}{op.kind.name}{op.microbatch}"
    message = f"rank {rank} holds {write(peaks[rank], up=True)} at {name}, and the plan allows {write(limit)}"
    notes = tuple(_notes(peak, schedule, write))
    notes = (*notes, "`recompute auto` has no levels that hold less") if chosen else notes
    less = "" if plan.offload else "`offload auto` to a `host`, "
    less += "" if chosen else _recompute_help(plan, peak)
    help = f"allow {write(peaks[rank], up=True)}, say `at auto`, {less}or use a schedule that holds fewer microbatches"
    raise DiagnosticError([Diagnostic("S406", message, Label(line.span), notes=notes, help=help, source=tree.source)])


def _notes(peak: Peak, schedule: Schedule, write: Callable[[float], str]) -> Iterator[str]:
    yield "most of it: " + ", ".join(f"{name} {write(value)}" for name, value in peak.parts[:3])
    span = schedule.spans[schedule.span[peak.row]]
    if schedule.source is not None and span != NOWHERE:
        yield f"that op is written at {schedule.source.place}:{span}"


def _recompute_help(plan: Plan, peak: Peak) -> str:
    names = [name for name, _ in peak.parts[:3]]
    moe = any(name.startswith("activations of MoE") for name in names)
    less = "`recompute` more, " if moe and plan.experts and plan.experts.width else ""
    less = "leave out `in bubbles`, " if any(level.bubbles for level in plan.recompute) else less
    return f"{less}give experts a `capacity`, " if _RUNNING_ROWS in names and plan.capacity is None else less


def _check_worst(tree: PlanTree, plan: Plan, line: MemoryLine) -> None:
    """S146: a memory and adaptive levels, where the plan does not say how many rows may come to a rank."""
    adaptive = any(level.adaptive is not None for level in plan.recompute)
    if not adaptive or (counted_layer(plan, True) and worst_case_rows(plan)):
        return
    message = "the memory and `adaptive`: how many rows may come to a rank is not known"
    help = "write `experts ... width F hidden H` and `topology nodes N x G`; with a `capacity`, `tokens` too"
    raise DiagnosticError([Diagnostic("S146", message, Label(line.span), help=help, source=tree.source)])
