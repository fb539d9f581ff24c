"""Whether the ranks keep within the memory of a plan: what they hold at their peak, and what fills the fullest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.memory import memory_changes
from schedc.cost.costs import Costs, StageCosts
from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.ops import BACKWARD, OpKind
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.layout.compare import load_per_rank
from schedc.layout.costs import LayerCosts
from schedc.layout.parts import WORK, Kind, Layout
from schedc.plan.facts import arrive, most_rows
from schedc.plan.levels import (
    Rows,
    adaptive_bytes,
    kept_share,
    layer_bytes,
    passing_bytes,
    slot_bytes,
    whole_bytes,
)
from schedc.plan.quantities import amount, plain, shown
from schedc.plan.values import ExpertPlan, Level, Recompute
from schedc.source import NOWHERE
from schedc.syntax.plan import MemoryLine, PlanTree

Floats = npt.NDArray[np.float64]

_MOE = [WORK.index(kind) for kind in (Kind.MOE, Kind.MTP)]
"""Places in `WORK` of the kinds of parts with experts in them."""
_WORKED_ON = "the rows of the microbatch that runs"


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

    activations: by kind, as `LayerCosts.activations`. Dense layers are taken as they are. What is adaptive counts as
    it is at its worst.
    """
    held = layout.counts[:, : len(WORK)] * np.array(activations, np.float64)
    if plan.recompute:
        held[:, _MOE] *= np.array([_held_share(plan, level) for level in plan.recompute])[:, np.newaxis]
    return np.asarray(held)


def _held_share(plan: ExpertPlan, level: Recompute) -> float:
    if level.adaptive is None or not _sized(plan):
        return kept_share(plan.experts, plan.dtype, level.level if level.adaptive is None else Level.NONE, arrive(plan))
    assert plan.experts is not None
    up_to = level.adaptive * plan.experts.top
    most = most_rows(plan) or Rows(up_to, up_to)
    return adaptive_bytes(plan.experts, plan.dtype, level, most) / layer_bytes(plan.experts, plan.dtype)


def _sized(plan: ExpertPlan) -> bool:
    return plan.experts is not None and bool(plan.experts.width and plan.experts.hidden)


def kept(plan: ExpertPlan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of their activations that the stages hold; arguments as for `held_by_kind`."""
    return _share(held_by_kind(plan, layout, activations), layout, activations)


def waiting(plan: ExpertPlan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] the same of what waits for its W: by then all has been worked out again, be there ever so many rows."""
    whole = held_by_kind(ExpertPlan(), layout, activations)
    more = worst_rows(plan, layout, activations).waiting
    return _share(whole + more, layout, activations)


def _share(held: Floats, layout: Layout, activations: tuple[float, ...]) -> Floats:
    whole = held_by_kind(ExpertPlan(), layout, activations).sum(1)
    return np.asarray(np.divide(held.sum(1), whole, out=np.ones(len(whole)), where=whole > 0))


@dataclass(frozen=True)
class Worst:
    """What a microbatch takes on adaptive stages in which as many rows come to a rank as can; nothing on others.

    waiting: [stages, kinds of `WORK`] beside what it holds at the mean, where all of it is there. passing: [stages]
    what comes and goes in the layer that is run.
    """

    waiting: Floats
    passing: Floats


def worst_rows(plan: ExpertPlan, layout: Layout, activations: tuple[float, ...]) -> Worst:
    """In the unit of ``activations``, by kind; nothing where the plan says too little, see `check_memory`."""
    held = held_by_kind(ExpertPlan(), layout, activations)
    waiting, passing = np.zeros_like(held), np.zeros(len(held))
    most = most_rows(plan)
    adaptive = [stage for stage, level in enumerate(plan.recompute) if level.adaptive is not None]
    if most is None or not adaptive or not _sized(plan):
        return Worst(waiting, passing)
    assert plan.experts is not None
    one = layer_bytes(plan.experts, plan.dtype)
    for kind in _MOE:
        waiting[adaptive, kind] = held[adaptive, kind] * (whole_bytes(plan.experts, plan.dtype, most) / one - 1)
        layer = np.where(layout.counts[adaptive, kind] > 0, activations[kind], 0.0)
        passing[adaptive] = np.maximum(passing[adaptive], layer * passing_bytes(plan.experts, plan.dtype, most) / one)
    return Worst(waiting, passing)


def kept_until_recomputed(plan: ExpertPlan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of its activations that a microbatch with an R holds until then: of the level of the stage, or
    where the plan says none that of `full`. NaN where no sizes of experts say it; arguments as for `held_by_kind`."""
    levels = [plan.recompute_of(stage) for stage in range(len(layout.stages))]
    silent = np.array([level.level is Level.NONE for level in levels])
    said = tuple(Recompute(Level.FULL) if level.level is Level.NONE else level for level in levels)
    share = kept(replace(plan, recompute=said), layout, activations)
    experts = layout.counts[:, _MOE].any(1) & _sized(plan)
    return np.where(silent & ~experts, np.nan, share)


@dataclass(frozen=True)
class Peak:
    """What a rank holds at its fullest: how much, at which op (row of the schedule; -1: of none), and of what."""

    rank: int
    held: float
    row: int
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Beside:
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


def beside(plan: ExpertPlan, layout: Layout, activations: tuple[float, ...], schedule: Schedule, sized: bool) -> Beside:
    """sized: whether memory is in bytes, in which slots are. In a pair two microbatches run, one of them backward."""
    slots, passing = hot_slots(plan, layout) if sized else (np.zeros(len(layout.stages)), 0.0)
    worst = worst_rows(plan, layout, activations)
    adaptive = worst.waiting.any(1)
    whole = (held_by_kind(ExpertPlan(), layout, activations) + worst.waiting)[:, _MOE].sum(1)
    run = 2 if (schedule.pair >= 0).any() else 1
    return Beside(slots, passing, np.where(adaptive, whole + run * worst.passing, 0.0))


def hot_slots(plan: ExpertPlan, layout: Layout) -> tuple[Floats, float]:
    """What hot experts take at most, `Beside.slots` and `Beside.passing`; nothing where the plan has none, does not say
    their sizes, or has a capacity."""
    stages = np.zeros(len(layout.stages))
    if plan.hot is None or plan.experts is None or plan.capacity is not None:
        return stages, 0.0
    own = plan.experts.count // plan.topology.ranks if plan.topology else 0
    one = float((own if plan.hot.most is None else plan.hot.most) * slot_bytes(plan.experts, plan.dtype))
    layers = layout.counts[:, _MOE].sum(1)
    return stages + one * layers, one * float(layers.any())


def peaks(layout: Layout, layers: LayerCosts, schedule: Schedule, costs: Costs, more: Beside) -> Floats:
    """[P] the most that each rank holds: its parameters, activations inside cells, and what is beside them."""
    running = _running(schedule, costs.resolved(schedule.stages), more)
    most = np.maximum(np.maximum.reduceat(running, schedule.rank_start[:-1]), 0.0) if running.size else 0.0
    parameters = load_per_rank(schedule.placement, layers.per_stage(layout, "parameters"))
    return np.asarray(parameters + more.passing + more.of(schedule) + most)


def _running(schedule: Schedule, costs: StageCosts, more: Beside) -> Floats:
    """[ops] activations and slots that the rank holds after each op; of a pair the forward counts first."""
    slots, again = more.slots, recomputed_ops(schedule)
    changes = memory_changes(
        costs.activation + slots, costs.pending_weight, costs.recomputed + slots, _restored(costs, more) + slots
    )
    added = changes[again.astype(np.int8), schedule.kind, schedule.stage]
    total = np.cumsum(added)
    start = schedule.rank_start[:-1]
    before = np.where(start > 0, total[np.maximum(start, 1) - 1], 0.0)
    return np.asarray(total - np.repeat(before, np.diff(schedule.rank_start)))


def _restored(costs: StageCosts, more: Beside) -> Floats:
    """[stages] what an R leaves: all that is there; on adaptive stages with as many rows as can come, as it then waits
    for its W."""
    return np.where(more.worked_on > 0, np.maximum(costs.pending_weight, costs.restored), costs.restored)


def peak_of(
    rank: int, plan: ExpertPlan, layout: Layout, layers: LayerCosts, schedule: Schedule, costs: Costs, more: Beside
) -> Peak:
    """What ``rank`` holds at its fullest, largest first."""
    parameters = held_by_kind(ExpertPlan(), layout, layers.parameters)
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
        held += let_go * of_stage.recomputed[stage] + restored * _restored(of_stage, more)[stage]
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
    _check_worst(tree, plan, line)
    limit, more = amount(line), beside(plan, layout, layers.activations, known.schedule, bool(line.unit))
    held = peaks(layout, layers, known.schedule, costs, more)
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
        yield f"that op is written at {schedule.source.name}:{span}"


def _recompute_help(plan: ExpertPlan, peak: Peak) -> str:
    names = [name for name, _ in peak.parts[:3]]
    moe = any(name.startswith("activations of MoE") for name in names)
    less = "`recompute` more, " if moe and plan.experts and plan.experts.width else ""
    less = "leave out `in bubbles`, " if any(level.bubbles for level in plan.recompute) else less
    return f"{less}give experts a `capacity`, " if _WORKED_ON in names and plan.capacity is None else less


def _check_worst(tree: PlanTree, plan: ExpertPlan, line: MemoryLine) -> None:
    """S146: a memory to keep within, and no saying how many rows may come."""
    if not any(level.adaptive is not None for level in plan.recompute) or (_sized(plan) and most_rows(plan)):
        return
    message = "the memory and `adaptive`: how many rows may come to a rank is not known"
    help = "write `experts ... width F hidden H` and `topology nodes N x G`; with a `capacity`, `tokens` too"
    raise DiagnosticError([Diagnostic("S146", message, Label(line.span), help=help, source=tree.source)])
