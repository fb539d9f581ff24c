"""Whether the ranks keep within the memory of a plan: what they hold at their peak, and what fills the fullest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.memory import memory_changes
from schedc.cost.costs import Costs, StageCosts
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.layout.compare import load_per_rank
from schedc.layout.costs import LayerCosts
from schedc.layout.parts import WORK, Kind, Layout
from schedc.plan.facts import arrive
from schedc.plan.levels import kept_share, layer_bytes, slot_bytes
from schedc.plan.quantities import amount, plain, shown
from schedc.plan.values import ExpertPlan
from schedc.source import NOWHERE
from schedc.syntax.plan import MemoryLine, PlanTree

Floats = npt.NDArray[np.float64]

_MOE = (Kind.MOE, Kind.MTP)
"""Kinds of parts with experts in them."""


def memory_line(plan: PlanTree) -> MemoryLine | None:
    return next((line for line in plan.lines if isinstance(line, MemoryLine)), None)


def activation_bytes(plan: ExpertPlan) -> float | None:
    """Bytes that one microbatch holds in a MoE layer, without recomputation; None where the plan says too little."""
    experts = plan.experts
    if experts is None or not (experts.width and experts.hidden and plan.tokens):
        return None
    return plan.tokens * layer_bytes(experts, plan.dtype)


def held_by_kind(plan: ExpertPlan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages, kinds of `WORK`] what the parts of the stages hold of a microbatch under the plan's recomputation.

    activations: by kind, as `LayerCosts.activations`. Dense layers are taken as they are, and so is what is only
    recomputed where rows are many: at the mean it is held.
    """
    held = layout.counts[:, : len(WORK)] * np.array(activations, np.float64)
    if plan.recompute:
        share = np.array([
            1.0 if level.adaptive is not None else kept_share(plan.experts, plan.dtype, level.level, arrive(plan))
            for level in plan.recompute
        ])  # fmt: skip
        held[:, [WORK.index(kind) for kind in _MOE]] *= share[:, np.newaxis]
    return np.asarray(held)


def kept(plan: ExpertPlan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of their activations that the stages hold; arguments as for `held_by_kind`."""
    whole = held_by_kind(ExpertPlan(), layout, activations).sum(1)
    held = held_by_kind(plan, layout, activations).sum(1)
    return np.asarray(np.divide(held, whole, out=np.ones(len(whole)), where=whole > 0))


@dataclass(frozen=True)
class Peak:
    """What a rank holds at its fullest: how much, at which op (row of the schedule; -1: of none), and of what."""

    rank: int
    held: float
    row: int
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Slots:
    """Bytes of slots for hot experts. held: [stages] of a microbatch in flight, its weights in every MoE layer.
    passing: of the gradients of one layer, on their way to the owners."""

    held: Floats
    passing: float = 0.0


def hot_slots(plan: ExpertPlan, layout: Layout) -> Slots:
    """What hot experts take at most; nothing where the plan has none, does not say their sizes, or has a capacity."""
    stages = np.zeros(len(layout.stages))
    if plan.hot is None or plan.experts is None or plan.capacity is not None:
        return Slots(stages)
    own = plan.experts.count // plan.topology.ranks if plan.topology else 0
    one = float((own if plan.hot.most is None else plan.hot.most) * slot_bytes(plan.experts, plan.dtype))
    layers = layout.counts[:, [WORK.index(kind) for kind in _MOE]].sum(1)
    return Slots(stages + one * layers, one * float(layers.any()))


def peaks(layout: Layout, layers: LayerCosts, schedule: Schedule, costs: Costs, slots: Slots) -> Floats:
    """[P] the most that each rank holds: its parameters, ``slots``, and activations inside cells."""
    running = _running(schedule, costs.resolved(schedule.stages), slots)
    most = np.maximum(np.maximum.reduceat(running, schedule.rank_start[:-1]), 0.0) if running.size else 0.0
    parameters = load_per_rank(schedule.placement, layers.per_stage(layout, "parameters"))
    return np.asarray(parameters + slots.passing + most)


def _running(schedule: Schedule, costs: StageCosts, slots: Slots) -> Floats:
    """[ops] activations and slots that the rank holds after each op; of a pair the forward counts first."""
    changes = memory_changes(costs.activation + slots.held, costs.pending_weight, costs.recomputed + slots.held)
    added = changes[recomputed_ops(schedule).astype(np.int8), schedule.kind, schedule.stage]
    total = np.cumsum(added)
    start = schedule.rank_start[:-1]
    before = np.where(start > 0, total[np.maximum(start, 1) - 1], 0.0)
    return np.asarray(total - np.repeat(before, np.diff(schedule.rank_start)))


def peak_of(
    rank: int, plan: ExpertPlan, layout: Layout, layers: LayerCosts, schedule: Schedule, costs: Costs, slots: Slots
) -> Peak:
    """What ``rank`` holds at its fullest, largest first."""
    parameters = held_by_kind(ExpertPlan(), layout, layers.parameters)
    activations = held_by_kind(plan, layout, layers.activations)
    of_stage, again = costs.resolved(schedule.stages), recomputed_ops(schedule)
    low, high = schedule.rank_start[rank : rank + 2]
    row = int(low + np.argmax(_running(schedule, of_stage, slots)[low:high]))
    stages = [int(stage) for stage in schedule.placement.stage_of_chunk[rank] if stage >= 0]
    parts: dict[str, float] = {"slots of hot experts": slots.passing}
    for stage in stages:
        _add(parts, "parameters of", parameters[stage], float(parameters[stage].sum()))
        own = low + np.flatnonzero(schedule.stage[low : row + 1] == stage)
        number = {kind: int((schedule.kind[own] == kind).sum()) for kind in OpKind}
        flying = number[OpKind.F] - number[OpKind.I] - number[OpKind.B]
        let_go = int((again[own] & (schedule.kind[own] == OpKind.F)).sum()) - number[OpKind.R]
        waiting = number[OpKind.I] - number[OpKind.W]
        held = (flying - let_go) * of_stage.activation[stage] + let_go * of_stage.recomputed[stage]
        _add(parts, "activations of", activations[stage], held)
        parts["slots of hot experts"] += flying * float(slots.held[stage])
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
    Kind.DENSE: "dense layers",
    Kind.MOE: "MoE layers",
    Kind.MTP: "predictions",
    Kind.EMBEDDING: "the embedding",
    Kind.HEAD: "the head",
}


def check_memory(
    tree: PlanTree, plan: ExpertPlan, layout: Layout, layers: LayerCosts, known: Dependencies, costs: Costs
) -> None:
    """Raise `DiagnosticError` (S406) if a rank holds more than the plan allows, with what fills the fullest.

    costs: those of the stages, with what recomputation leaves of their activations.
    """
    line = memory_line(tree)
    if line is None:
        return
    limit, slots = amount(line), hot_slots(plan, layout) if line.unit else Slots(np.zeros(len(layout.stages)))
    held = peaks(layout, layers, known.schedule, costs, slots)
    rank = int(np.argmax(held))
    if held[rank] <= limit * (1 + 1e-12):
        return
    say = shown if line.unit else plain
    peak = peak_of(rank, plan, layout, layers, known.schedule, costs, slots)
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
        yield f"that op is written at {schedule.source.name}:{span}"


def _recompute_help(plan: ExpertPlan, peak: Peak) -> str:
    moe = any(name.startswith("activations of MoE") for name, _ in peak.parts[:3])
    return "`recompute` more, " if moe and plan.experts and plan.experts.width else ""
