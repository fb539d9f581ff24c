"""What the stages of a layout hold of a microbatch under a plan's recomputation, and in shares of all that is there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schedc.layout.parts import WORK, Kind, Layout
from schedc.plan.recompute_bytes import Rows, adaptive_bytes, kept_share, layer_bytes, passing_bytes, whole_bytes
from schedc.plan.row_counts import arrive, most_rows
from schedc.plan.values import ExpertPlan, Level, Recompute

Floats = npt.NDArray[np.float64]

MOE = [WORK.index(kind) for kind in (Kind.MOE, Kind.MTP)]
"""Places in `WORK` of the kinds of parts with experts in them."""


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
        held[:, MOE] *= np.array([_held_share(plan, level) for level in plan.recompute])[:, np.newaxis]
    return np.asarray(held)


def _held_share(plan: ExpertPlan, level: Recompute) -> float:
    if level.adaptive is None or not is_sized(plan):
        return kept_share(plan.experts, plan.dtype, level.level if level.adaptive is None else Level.NONE, arrive(plan))
    assert plan.experts is not None
    up_to = level.adaptive * plan.experts.top
    most = most_rows(plan) or Rows(up_to, up_to)
    return adaptive_bytes(plan.experts, plan.dtype, level, most) / layer_bytes(plan.experts, plan.dtype)


def is_sized(plan: ExpertPlan) -> bool:
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
    if most is None or not adaptive or not is_sized(plan):
        return Worst(waiting, passing)
    assert plan.experts is not None
    one = layer_bytes(plan.experts, plan.dtype)
    for kind in MOE:
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
    experts = layout.counts[:, MOE].any(1) & is_sized(plan)
    return np.where(silent & ~experts, np.nan, share)
