"""What the stages of a layout hold of a microbatch under a plan's recomputation, and in shares of all that is there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from schedc.ir.arrays import Floats
from schedc.layout.parts import WORK, Layout, PartKind
from schedc.plan.recompute_bytes import (
    RowsPerToken,
    adaptive_bytes,
    layer_bytes,
    level_share,
    passing_bytes,
    whole_bytes,
)
from schedc.plan.row_counts import arriving_rows, worst_case_rows
from schedc.plan.values import Attachments, Level, Recompute

MOE = [WORK.index(kind) for kind in (PartKind.MOE, PartKind.MTP)]
"""Places in `WORK` of the kinds of parts with experts in them."""


def activation_bytes(plan: Attachments) -> float | None:
    """Bytes that one microbatch holds in a MoE layer, without recomputation; None where the plan says too little."""
    experts = plan.experts
    if experts is None or not (experts.width and experts.hidden and plan.tokens):
        return None
    return plan.tokens * layer_bytes(experts, plan.dtype)


def held_by_kind(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages, kinds of `WORK`] what the parts of the stages hold of a microbatch under the plan's recomputation.

    activations: by kind, as `LayerCosts.activations`. Dense layers are taken as they are. What is adaptive counts as
    it is at its worst.
    """
    held = layout.counts[:, : len(WORK)] * np.array(activations, np.float64)
    if plan.recompute:
        held[:, MOE] *= np.array([_level_held(plan, level) for level in plan.recompute])[:, np.newaxis]
    return np.asarray(held)


def _level_held(plan: Attachments, level: Recompute) -> float:
    if level.adaptive is None or not is_sized(plan):
        return level_share(
            plan.experts, plan.dtype, level.level if level.adaptive is None else Level.NONE, arriving_rows(plan)
        )
    assert plan.experts is not None
    up_to = level.adaptive * plan.experts.top
    most = worst_case_rows(plan) or RowsPerToken(up_to, up_to)
    return adaptive_bytes(plan.experts, plan.dtype, level, most) / layer_bytes(plan.experts, plan.dtype)


def is_sized(plan: Attachments) -> bool:
    return plan.experts is not None and bool(plan.experts.width and plan.experts.hidden)


def kept_share(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of their activations that the stages hold; arguments as for `held_by_kind`."""
    return _share(held_by_kind(plan, layout, activations), layout, activations)


def pending_share(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] the same of what waits for its W: by then all has been worked out again, be there ever so many rows."""
    whole = held_by_kind(Attachments(), layout, activations)
    more = worst_routing(plan, layout, activations).waiting
    return _share(whole + more, layout, activations)


def _share(held: Floats, layout: Layout, activations: tuple[float, ...]) -> Floats:
    whole = held_by_kind(Attachments(), layout, activations).sum(1)
    return np.asarray(np.divide(held.sum(1), whole, out=np.ones(len(whole)), where=whole > 0))


@dataclass(frozen=True)
class WorstRouting:
    """What a microbatch takes on adaptive stages in which as many rows come to a rank as can; nothing on others.

    waiting: [stages, kinds of `WORK`] beside what it holds at the mean, where all of it is there. passing: [stages]
    what comes and goes in the layer that is run.
    """

    waiting: Floats
    passing: Floats


def worst_routing(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> WorstRouting:
    """In the unit of ``activations``, by kind; nothing where the plan says too little, see `check_memory`."""
    held = held_by_kind(Attachments(), layout, activations)
    waiting, passing = np.zeros_like(held), np.zeros(len(held))
    most = worst_case_rows(plan)
    adaptive = [stage for stage, level in enumerate(plan.recompute) if level.adaptive is not None]
    if most is None or not adaptive or not is_sized(plan):
        return WorstRouting(waiting, passing)
    assert plan.experts is not None
    one = layer_bytes(plan.experts, plan.dtype)
    for kind in MOE:
        waiting[adaptive, kind] = held[adaptive, kind] * (whole_bytes(plan.experts, plan.dtype, most) / one - 1)
        layer = np.where(layout.counts[adaptive, kind] > 0, activations[kind], 0.0)
        passing[adaptive] = np.maximum(passing[adaptive], layer * passing_bytes(plan.experts, plan.dtype, most) / one)
    return WorstRouting(waiting, passing)


def share_until_recomputed(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of its activations that a microbatch with an R holds until then: of the level of the stage, or
    where the plan says none that of `full`. NaN where no sizes of experts say it; arguments as for `held_by_kind`."""
    levels = [plan.recompute_of(stage) for stage in range(len(layout.stages))]
    silent = np.array([level.level is Level.NONE for level in levels])
    said = tuple(Recompute(Level.FULL) if level.level is Level.NONE else level for level in levels)
    share = kept_share(replace(plan, recompute=said), layout, activations)
    experts = layout.counts[:, MOE].any(1) & is_sized(plan)
    return np.where(silent & ~experts, np.nan, share)
