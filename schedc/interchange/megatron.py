"""Writes the command-line flags with which Megatron-LM runs a schedule, if it has the schedule.

Megatron generates its orders itself (megatron/core/pipeline_parallel/schedules.py). A schedule is compared with these
orders, op for op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.interchange.megatron_plan import RELEASE, MegatronPlan
from schedc.interchange.refusals import cannot, one_copy, only_exported_ops, placement_form
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.load.library import names, open_schedule
from schedc.plan.layout.parser import parse_layout, write_layout
from schedc.plan.layout.parts import Layout, PartKind
from schedc.step.costs.costs import Costs
from schedc.units import equations

_COLUMNS = ("rank_start", "kind", "stage", "microbatch")
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_OVERLAP = "--overlap-moe-expert-parallel-comm"
Flags = tuple[str, ...]


@dataclass(frozen=True)
class _MegatronMode:
    """An order that Megatron can run.

    schedule: the library schedule with this order. needs: whether Megatron has the order at these ranks, microbatches
    and chunks. flags: the flags that choose it, from the same numbers.
    """

    schedule: str
    needs: Callable[[int, int, int], bool]
    flags: Callable[[int, int, int], Flags]


def _group(ranks: int, microbatches: int) -> int:
    """Number of consecutive microbatches of a chunk, as in `interleaved_1f1b`: P if P divides M."""
    return microbatches // max(1, microbatches // ranks)


def _interleaved(ranks: int, microbatches: int, chunks: int) -> Flags:
    return (
        f"{_CHUNKS} {chunks}",
        f"--microbatch-group-size-per-virtual-pipeline-stage {_group(ranks, microbatches)}",
    )


def _has_groups(ranks: int, microbatches: int, chunks: int) -> bool:
    return chunks > 1 and 1 < ranks <= microbatches


_MODES = (
    _MegatronMode("1f1b", lambda P, M, v: v == 1, lambda P, M, v: ()),
    _MegatronMode("1f1b_overlap", lambda P, M, v: P == v == 1, lambda P, M, v: (_OVERLAP,)),
    _MegatronMode("interleaved_1f1b", _has_groups, _interleaved),
    _MegatronMode(
        "interleaved_overlap",
        _has_groups,
        lambda P, M, v: (*_interleaved(P, M, v), _OVERLAP),
    ),
)


def to_megatron(schedule: Schedule, _costs: Costs | None = None, layout: Layout | None = None) -> str:
    """The target ``megatron``: flags, one per line, under comments that say what else must hold; ends with a newline.

    layout: the layers of each stage, by default those of the schedule. Its paddings are left out, because they hold
    nothing.
    Raises `DiagnosticError`: S603 for two copies of a stage, S609 for an order with Rs. S607 for an order that
    Megatron does not make, for a layout with other stages, and for what `MegatronPlan` refuses; S614 for its lines.
    """
    if layout is None and schedule.layout:
        layout = parse_layout(schedule.layout, dense=None if schedule.plan.experts is None else 0)
    one_copy(schedule.placement, "Megatron", schedule.source)
    only_exported_ops(schedule, "Megatron")
    form = placement_form(schedule.placement)
    ranks, microbatches = schedule.ranks, schedule.microbatches
    if form is None or form[0] != "loop":
        why = "Megatron puts stage s on rank s mod P; here the stages lie otherwise"
        raise _refusal(schedule, why, "interleaved_1f1b")
    chunks = form[1]
    modes = [mode for mode in _MODES if mode.schedule in names() and mode.needs(ranks, microbatches, chunks)]
    for mode in modes:
        theirs = _megatron_order(mode, ranks, microbatches, chunks)
        if theirs is not None and _same(schedule, theirs):
            flags = mode.flags(ranks, microbatches, chunks)
            plan = MegatronPlan(schedule.plan, layout, _OVERLAP in flags, schedule.source)
            flags = flags if layout is None else _with_layout(schedule, layout, flags)
            return _text(schedule, flags, plan)
    nearest = modes[0].schedule if modes else "1f1b"
    raise _refusal(schedule, _reason(schedule, modes[0] if modes else None, chunks), nearest)


def _megatron_order(mode: _MegatronMode, ranks: int, microbatches: int, chunks: int) -> Schedule | None:
    """Megatron's order at these sizes; None if it has none."""
    tree = open_schedule(mode.schedule)
    values = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    try:
        return elaborate(tree, {parameter.name: values[parameter.role] for parameter in tree.parameters})
    except DiagnosticError:
        return None


def _same(one: Schedule, other: Schedule) -> bool:
    columns = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in _COLUMNS)
    return columns and np.array_equal(one.pair >= 0, other.pair >= 0)


def _with_layout(schedule: Schedule, layout: Layout, flags: Flags) -> Flags:
    """The flags with a layout, which replaces the flag for the number of chunks."""
    if len(layout.stages) != schedule.stages:
        message = f"the layout has {len(layout.stages)} stages, {schedule.name} has {schedule.stages}"
        why = "Megatron's layout names every stage of every rank, chunk after chunk"
        raise cannot("S607", message, why, "`schedc layout --schedule` makes one that fits", schedule.source)
    if layout.losses > 1 or layout.embeds_first:
        what = f"{layout.losses} losses" if layout.losses > 1 else "the embedding of predictions in the first stage"
        message = f"the layout has {what}"
        why = "Megatron's layout has one L, and no e"
        raise cannot("S607", message, why, "write one L in the last stage, and no e", schedule.source)
    predictions = layout.counts[:, list(PartKind).index(PartKind.MTP)]
    if predictions[: -schedule.ranks].any():
        message = "the layout has multi-token predictions on a chunk that is not the last of its rank"
        raise cannot("S607", message, "Megatron has predictions on the last chunk", "put them there", schedule.source)
    if np.count_nonzero(predictions) > 1:
        message = "the layout has multi-token predictions in several stages"
        raise cannot("S607", message, "Megatron runs all of them together", "put them into one stage", schedule.source)
    bare = Layout(tuple(tuple(part for part in stage if part.kind is not PartKind.NOOP) for stage in layout.stages))
    mtp = (f"--mtp-num-layers {predictions.sum()}",) if predictions.any() else ()
    kept = tuple(flag for flag in flags if not flag.startswith(_CHUNKS))
    return (f"--num-layers {layout.layers}", *mtp, f'--pipeline-model-parallel-layout "{write_layout(bare)}"', *kept)


def _text(schedule: Schedule, flags: Flags, attached: MegatronPlan) -> str:
    plan, more = attached.plan, attached.flags()
    lines = [f"# {schedule.name}: {equations(schedule.sizes)}", f"# Flags of Megatron-LM with megatron-core {RELEASE}."]
    if plan != Plan() and all(open_schedule(name).doc != schedule.doc for name in _shipped()):
        lines += [f"# From its comment: {line}" for line in schedule.doc.splitlines() if line.strip()]
    if plan.parallel is not None:
        lines.append(f"# For {plan.parallel.per_rank * schedule.ranks} processes.")
    if plan.parallel is None or plan.batch is None:
        batch = f"{schedule.microbatches} x --micro-batch-size x the data-parallel size"
        lines.append(f"# --global-batch-size must be {batch}.")
    lines += [f"# {note}" for note in attached.notes()]
    lines += [f"--pipeline-model-parallel-size {schedule.ranks}", *flags, *more]
    return "\n".join(lines) + "\n"


def _shipped() -> list[str]:
    """The schedules of the library with Megatron's orders, whose comments say nothing of a plan."""
    return [mode.schedule for mode in _MODES if mode.schedule in names()]


def _reason(schedule: Schedule, mode: _MegatronMode | None, chunks: int) -> str:
    """The reason why no mode fits: the first op at which Megatron's order differs."""
    order = _megatron_order(mode, schedule.ranks, schedule.microbatches, chunks) if mode else None
    if mode is None or order is None:
        return (
            f"Megatron interleaves only with 2 ranks or more and no more ranks than microbatches ({chunks} chunks here)"
        )
    for rank in range(schedule.ranks):
        ours, theirs = [str(op) for op in schedule.ops(rank)], [str(op) for op in order.ops(rank)]
        for place, (own, other) in enumerate(zip(ours, theirs, strict=False)):
            if own != other:
                return f"op {place} of rank {rank} is {own}, where Megatron runs {other}"
        if len(ours) != len(theirs):
            return f"rank {rank} has {len(ours)} ops, Megatron's {len(theirs)}: it does not split the backward"
    return "the ops are Megatron's, but it does not overlap them in these pairs"


def _refusal(schedule: Schedule, why: str, nearest: str) -> DiagnosticError:
    message = f"Megatron cannot run the order of {schedule.name}"
    return cannot("S607", message, why, f"`{nearest}` is the nearest there", schedule.source)
