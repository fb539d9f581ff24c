"""Whether the ranks keep within the memory of a plan: what they hold at their peak, and what fills the fullest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.memory import memory_changes
from schedc.cost.costs import Costs, StageCosts
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import Floats, reduceat, repeat
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.layout.compare import load_per_rank
from schedc.layout.costs import LayerCosts
from schedc.layout.parts import WORK, Layout, PartKind
from schedc.plan.activation_memory import MOE, held_by_kind, is_sized, worst_routing
from schedc.plan.recompute_bytes import slot_bytes
from schedc.plan.row_counts import worst_case_rows
from schedc.plan.units import amount, plain, shown
from schedc.plan.values import Attachments
from schedc.source import NOWHERE
from schedc.syntax.plan import MemoryLine, PlanTree

_WORKED_ON = "the rows of the microbatch that runs"


@dataclass(frozen=True)
class Peak:
    """What a rank holds at its fullest: how much, at which op (row of the schedule), and of what."""

    rank: int
    held: float
    row: int
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ExtraMemory:
    """What ranks hold beside parameters and activations.

    slots: [stages] of hot experts, for a microbatch in flight, its weights in every MoE layer. passing: of the
    gradients of one layer, on their way to the owners. worked_on: [stages] of the microbatch that runs, where
    recomputation is adaptive and all rows come to this rank.
    """

    slots: Floats
    passing: float
    worked_on: Floats

    def of(self, schedule: Schedule) -> Floats:
        """[P] of the microbatch that runs, on the stage of each rank where it takes most."""
        stages = schedule.placement.stage_of_chunk
        return np.asarray(np.where(stages >= 0, self.worked_on[stages], 0.0).max(1))


def extra_memory(
    plan: Attachments, layout: Layout, activations: tuple[float, ...], schedule: Schedule, sized: bool
) -> ExtraMemory:
    """sized: whether memory is in bytes, in which slots are. In a pair two microbatches run, one of them backward."""
    slots, passing = hot_slots(plan, layout) if sized else (np.zeros(len(layout.stages)), 0.0)
    worst = worst_routing(plan, layout, activations)
    adaptive = worst.waiting.any(1)
    whole = (held_by_kind(Attachments(), layout, activations) + worst.waiting)[:, MOE].sum(1)
    run = 2 if (schedule.pair >= 0).any() else 1
    return ExtraMemory(slots, passing, np.where(adaptive, whole + run * worst.passing, 0.0))


def hot_slots(plan: Attachments, layout: Layout) -> tuple[Floats, float]:
    """(`ExtraMemory.slots`, `ExtraMemory.passing`) of a plan's hot experts, at most.

    Both are 0 where the plan has none, does not say their sizes, or has a capacity.
    """
    stages = np.zeros(len(layout.stages))
    if plan.hot is None or plan.experts is None or plan.capacity is not None:
        return stages, 0.0
    own = plan.experts.count // plan.topology.ranks if plan.topology else 0
    one = float((own if plan.hot.most is None else plan.hot.most) * slot_bytes(plan.experts, plan.dtype))
    layers = layout.counts[:, MOE].sum(1)
    return stages + one * layers, one * float(layers.any())


def rank_peaks(layout: Layout, layers: LayerCosts, schedule: Schedule, costs: Costs, more: ExtraMemory) -> Floats:
    """[P] the most that each rank holds: its parameters, activations inside cells, and what is beside them."""
    running = _running(schedule, costs.resolved(schedule.stages), more)
    most = np.maximum(reduceat(np.maximum, running, schedule.rank_start[:-1]), 0.0) if running.size else 0.0
    parameters = load_per_rank(schedule.placement, layers.per_stage(layout, "parameters"))
    return np.asarray(parameters + more.passing + more.of(schedule) + most)


def _running(schedule: Schedule, costs: StageCosts, more: ExtraMemory) -> Floats:
    """[ops] activations and slots that the rank holds after each op; of a pair the forward counts first."""
    slots, again = more.slots, recomputed_ops(schedule)
    changes = memory_changes(
        costs.activation + slots, costs.pending_weight, costs.recomputed + slots, costs.restored + slots
    )
    added = changes[again.astype(np.int8), schedule.kind, schedule.stage]
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
    more: ExtraMemory,
) -> Peak:
    """What ``rank`` holds at its fullest, largest first."""
    parameters = held_by_kind(Attachments(), layout, layers.parameters)
    activations = held_by_kind(plan, layout, layers.activations)
    of_stage, again = costs.resolved(schedule.stages), recomputed_ops(schedule)
    low, high = schedule.rank_start[rank : rank + 2]
    row = int(low + np.argmax(_running(schedule, of_stage, more)[low:high]))
    stages = [int(stage) for stage in schedule.placement.stage_of_chunk[rank] if stage >= 0]
    parts = {"slots of hot experts": more.passing, _WORKED_ON: float(more.of(schedule)[rank])}
    for stage in stages:
        _add(parts, "parameters of", parameters[stage], float(parameters[stage].sum()))
        own = low + np.flatnonzero(schedule.stage[low : row + 1] == stage)
        number = {kind: int((schedule.kind[own] == kind).sum()) for kind in OpKind}
        flying = number[OpKind.F] - number[OpKind.I] - number[OpKind.B]
        let_go = int((again[own] & (schedule.kind[own] == OpKind.F)).sum()) - number[OpKind.R]
        restored = number[OpKind.R] - int((again[own] & BACKWARD[schedule.kind[own]]).sum())
        waiting = number[OpKind.I] - number[OpKind.W]
        held = (flying - let_go - restored) * of_stage.activation[stage]
        held += let_go * of_stage.recomputed[stage] + restored * of_stage.restored[stage]
        _add(parts, "activations of", activations[stage], held)
        parts["slots of hot experts"] += flying * float(more.slots[stage])
        parts["deferred weight gradients"] = (
            parts.get("deferred weight gradients", 0.0) + waiting * of_stage.pending_weight[stage]
        )
    order = sorted(((name, value) for name, value in parts.items() if value > 0), key=lambda part: -part[1])
    return Peak(rank, sum(value for _, value in order), row, tuple(order))


def _add(parts: dict[str, float], what: str, weights: Floats, held: float) -> None:
    """Share out what a stage holds over the kinds of its parts, by ``weights`` [kinds]."""
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


def check_memory(
    tree: PlanTree, plan: Attachments, layout: Layout, layers: LayerCosts, known: Dependencies, costs: Costs
) -> None:
    """Raise `DiagnosticError` (S406) if a rank holds more than the plan allows, with what fills the fullest.

    costs: those of the stages, with what recomputation leaves of their activations.
    """
    line = tree.memory
    if line is None:
        return
    _check_worst(tree, plan, line)
    limit, more = amount(line), extra_memory(plan, layout, layers.activations, known.schedule, bool(line.unit))
    held = rank_peaks(layout, layers, known.schedule, costs, more)
    rank = int(np.argmax(held))
    if held[rank] <= limit * (1 + 1e-12):
        return
    say = shown if line.unit else plain
    peak = peak_of(rank, plan, layout, layers, known.schedule, costs, more)
    op = known.schedule.op(peak.row)
    name = f"{op.stage}{op.kind.name}{op.microbatch}"
    message = f"rank {rank} holds {say(held[rank], up=True)} at {name}, and the plan allows {say(limit)}"
    notes = tuple(_notes(peak, known.schedule, say))
    less = _recompute_help(plan, peak)
    help = f"allow {say(held[rank], up=True)}, say `at auto`, {less}or use a schedule that holds fewer microbatches"
    raise DiagnosticError([Diagnostic("S406", message, Label(line.span), notes=notes, help=help, source=tree.source)])


def _notes(peak: Peak, schedule: Schedule, say: Callable[[float], str]) -> Iterator[str]:
    yield "most of it: " + ", ".join(f"{name} {say(value)}" for name, value in peak.parts[:3])
    span = schedule.spans[schedule.span[peak.row]]
    if schedule.source is not None and span != NOWHERE:
        yield f"that op is written at {schedule.source.place}:{span}"


def _recompute_help(plan: Attachments, peak: Peak) -> str:
    names = [name for name, _ in peak.parts[:3]]
    moe = any(name.startswith("activations of MoE") for name in names)
    less = "`recompute` more, " if moe and plan.experts and plan.experts.width else ""
    less = "leave out `in bubbles`, " if any(level.bubbles for level in plan.recompute) else less
    return f"{less}give experts a `capacity`, " if _WORKED_ON in names and plan.capacity is None else less


def _check_worst(tree: PlanTree, plan: Attachments, line: MemoryLine) -> None:
    """S146: a memory to keep within, and no saying how many rows may come."""
    if not any(level.adaptive is not None for level in plan.recompute) or (is_sized(plan) and worst_case_rows(plan)):
        return
    message = "the memory and `adaptive`: how many rows may come to a rank is not known"
    help = "write `experts ... width F hidden H` and `topology nodes N x G`; with a `capacity`, `tokens` too"
    raise DiagnosticError([Diagnostic("S146", message, Label(line.span), help=help, source=tree.source)])
