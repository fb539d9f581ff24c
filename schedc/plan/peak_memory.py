"""Checks the ranks against the memory of a plan: peaks, and contents of the fullest rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import Floats, Int64
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.plan import Plan
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.ir.works import WorkKind
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

_RUNNING_ROWS, _SLOTS, _PENDING = (
    "the rows of the microbatch that runs", "slots of hot experts", "deferred weight gradients",
)  # fmt: skip
_OF_REPLICAS = {
    "whole parameters": (WorkKind.GATHER, WorkKind.DROP),
    "gradient buckets": (WorkKind.SCATTER, WorkKind.SPREAD),
}
"""What works among replicas hold on the device, and the works that it follows from."""


class Peak(NamedTuple):
    """The peak of a rank. row: the op there, as a row of the schedule. parts: (purpose, memory), largest first."""

    row: int
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, eq=False)
class MemoryBesideWorks:
    """What ranks hold in a step with works, in the unit of the plan's memory.

    held: without works. placed: the works. freed: [stages] memory of dense parameters that replicas shard, which a
    replica does not hold between the uses of a stage; or 0.
    """

    held: HeldMemory
    dependencies: Dependencies
    placed: PlacedWorks
    freed: Floats | float = 0.0

    @cached_property
    def away(self) -> Floats:
        """[ops] memory on the host while each op runs."""
        return np.asarray(self.placed.away(self.dependencies)[self.dependencies.cell_of])

    @cached_property
    def sharded(self) -> Floats:
        """[P] memory that each rank does not hold between the uses of its stages."""
        return load_per_rank(self.held.schedule.placement, np.asarray(self.freed))

    @cached_property
    def peaks(self) -> Floats:
        """[P] the most of each rank, in its cells and between them.

        In a gap all offloads are joined before fetches start. So offloads alone hold the most in front of a gap or
        behind it, which is in a cell.
        """
        peaks = self.held.peaks(self.away)
        if not self.placed.moves_activations_alone:
            last = np.maximum(self.dependencies.first, self.dependencies.second)
            between = self.placed.peaks_between(self.dependencies, self.held.after[last])
            peaks = np.maximum(peaks, self.held.standing + between)
        return np.asarray(peaks - self.sharded)

    @property
    def bytes(self) -> RankBytes:
        """The `peaks`, and the same with what runs inside cells."""
        working = working_of_ops(self.held, self.dependencies)
        if working is None:
            return RankBytes(self.peaks, None)
        return RankBytes(self.peaks, np.maximum(self.peaks, self.held.peaks(self.away - working) - self.sharded))

    def peak(self, rank: int) -> Peak:
        """The peak of a rank with its parts."""
        held = self.held
        schedule, of_stage, slots = held.schedule, held.of_stage, held.slots
        parameters = held.layers.parameters_in(held.layout)
        activations, freed = held.activations.held, np.broadcast_to(self.freed, schedule.stages)
        low, high = schedule.rank_start[rank : rank + 2]
        row = int(low + np.argmax((held.inside - self.away)[low:high]))
        parts = {
            _SLOTS: slots.passing + float(slots.kept_per_rank(schedule)[rank]),
            _RUNNING_ROWS: float(held.running[rank]),
            _PENDING: 0.0,
        }
        for stage in (int(stage) for stage in schedule.placement.stage_of_chunk[rank] if stage >= 0):
            _add(parts, "parameters of", parameters[stage], float(parameters[stage].sum()) - float(freed[stage]))
            in_flight, unsaved, restored, pending = _microbatches(schedule, low + np.arange(row + 1 - low), stage)
            own_held = (in_flight - unsaved - restored) * of_stage.activation[stage]
            own_held += unsaved * of_stage.recomputed[stage] + restored * of_stage.restored[stage]
            _add(parts, "activations of", activations[stage], own_held - self._away_of_stage(row, stage))
            parts[_SLOTS] += in_flight * float(slots.in_flight[stage])
            parts[_PENDING] += pending * of_stage.pending_weight[stage]
        parts |= self._of_replicas(row, rank)
        order = sorted(((name, value) for name, value in parts.items() if value > 0), key=lambda part: -part[1])
        return Peak(row, tuple(order))

    def _of_replicas(self, row: int, rank: int) -> dict[str, float]:
        """What works among replicas hold on a rank while the op of a row runs, by what it is for."""
        cell = self.dependencies.cell_of[row]
        here = self.placed.only(self.placed.rank_of(self.placed.start, self.dependencies) == rank)
        return {
            name: -float(here.of_kinds(*kinds).away(self.dependencies)[cell]) for name, kinds in _OF_REPLICAS.items()
        }

    def _away_of_stage(self, row: int, stage: int) -> float:
        """Memory of one stage on the host while the op of a row runs."""
        part = self.placed.of_activations
        part = part.only(part.works.stage == stage)
        return float(part.away(self.dependencies)[self.dependencies.cell_of[row]])


def _microbatches(schedule: Schedule, rows: Int64, stage: int) -> tuple[int, int, int, int]:
    """Microbatches of a stage behind these rows of a rank: in flight, before their R, behind it, between I and W."""
    own = rows[schedule.stage[rows] == stage]
    kinds, recomputed = schedule.kind[own], recomputed_ops(schedule)[own]
    number = {kind: int((kinds == kind).sum()) for kind in OpKind}
    in_flight = number[OpKind.F] - number[OpKind.I] - number[OpKind.B]
    unsaved = int((recomputed & (kinds == OpKind.F)).sum()) - number[OpKind.R]
    restored = number[OpKind.R] - int((recomputed & BACKWARD[kinds]).sum())
    return in_flight, unsaved, restored, number[OpKind.I] - number[OpKind.W]


def _add(parts: dict[str, float], what: str, weights: Floats, held: float) -> None:
    """Adds the memory of a stage to ``parts``, divided over the kinds of its parts by ``weights`` [kinds]."""
    if (whole := float(weights.sum())) <= 0:
        parts[f"{what} stages"] = parts.get(f"{what} stages", 0.0) + held
        return
    for kind, weight in zip(WORK, weights.tolist(), strict=True):
        name = f"{what} {KIND_NAMES[kind]}"
        parts[name] = parts.get(name, 0.0) + held * weight / whole


def check_memory(
    tree: PlanTree,
    held: HeldMemory,
    dependencies: Dependencies,
    placed: PlacedWorks | None = None,
    chosen: bool = False,
    freed: Floats | float = 0.0,
) -> RankBytes | None:
    """The bytes of ranks; None for a plan whose memory has no unit.

    Raises `DiagnosticError` (S406) where a rank holds more than the plan's memory, with what fills the fullest rank.

    placed: works beside the cells. chosen: the levels hold least, because no others fit. held, freed: as
    in `MemoryBesideWorks`.
    """
    line, plan, schedule = tree.memory, held.plan, dependencies.schedule
    if line is None:
        return None
    _check_worst(tree, plan, line)
    memory = MemoryBesideWorks(held, dependencies, placed or PlacedWorks.none(), freed)
    peaks, limit = memory.peaks, amount(line.limit, line.unit)
    rank = int(np.argmax(peaks))
    if peaks[rank] <= limit * (1 + 1e-12):
        return memory.bytes if line.unit else None
    write = shown if line.unit else plain
    peak = memory.peak(rank)
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
    sized = {"MoE": plan.has_expert_sizes, "dense": plan.has_dense_sizes}
    less = "`recompute` more, " if any(sized.get(name.split()[2]) for name in names if " of " in name) else ""
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
