"""Activations that the stages of a layout hold per microbatch under a plan's recomputation: amounts and shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedc.attachments.recompute_bytes import (
    RowsPerToken,
    adaptive_bytes,
    layer_bytes,
    level_share,
    output_gradient_bytes,
    passing_bytes,
    whole_bytes,
)
from schedc.attachments.row_counts import arriving_rows, filled, worst_case_rows
from schedc.attachments.values import Attachments, Level, Recompute
from schedc.ir.arrays import Floats
from schedc.layout.parts import WITH_EXPERTS, WORK, Layout, ModelPart, layers_in

MOE = [WORK.index(kind) for kind in WITH_EXPERTS]
"""Indices into `WORK` of the kinds of parts that have experts."""


def activation_bytes(plan: Attachments) -> float | None:
    """Bytes that a microbatch holds in one MoE layer without recomputation; None where the plan says too little."""
    experts = plan.experts
    if experts is None or not (experts.width and experts.hidden and plan.tokens):
        return None
    return plan.tokens * layer_bytes(experts, plan.dtype, filled(plan))


def held_by_kind(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages, kinds of `WORK`] activations that a microbatch holds under the plan's recomputation.

    The unit is that of ``activations``, which has one number per kind as `LayerCosts.activations`. Levels apply to
    layers with experts only. An adaptive level counts with its worst case.
    """
    held = layout.counts[:, : len(WORK)] * np.array(activations, np.float64)
    for stage, recompute in enumerate(plan.recompute):
        held[stage, MOE] = held[stage, MOE] * _held_share(plan, recompute, layout.stages[stage])
    return np.asarray(held)


def _held_share(plan: Attachments, recompute: Recompute, parts: Sequence[ModelPart]) -> float:
    """Share of the activations of a stage's MoE layers that a microbatch holds. parts: those of the stage."""
    levels = recompute.of_layers_up_to(len(layers_in(parts)))
    own = [level for (kind, _), level in zip(layers_in(parts), levels, strict=True) if kind in WITH_EXPERTS]
    shares = {level: _level_held(plan, replace(recompute, level=level, layers=())) for level in own}
    if len(shares) <= 1:
        return next(iter(shares.values()), 1.0)
    return sum(shares[level] for level in own) / len(own)


def _level_held(plan: Attachments, level: Recompute) -> float:
    if level.adaptive is None or not is_sized(plan):
        taken = level.level if level.adaptive is None else Level.NONE
        return level_share(plan.experts, plan.dtype, taken, arriving_rows(plan), filled(plan))
    assert plan.experts is not None
    up_to = level.adaptive * plan.experts.top
    most = worst_case_rows(plan) or RowsPerToken(up_to, up_to)
    return adaptive_bytes(plan.experts, plan.dtype, level, most) / layer_bytes(plan.experts, plan.dtype, filled(plan))


def is_sized(plan: Attachments) -> bool:
    """Whether the plan says the columns of an expert and of a token."""
    return plan.experts is not None and bool(plan.experts.width and plan.experts.hidden)


def kept_share(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of a microbatch's activations held from its forward on; arguments as for `held_by_kind`."""
    return _share(held_by_kind(plan, layout, activations), layout, activations)


def restored_share(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of a microbatch's activations held from its R on; arguments as for `held_by_kind`.

    With adaptive levels it is above 1 where more rows than the mean may come.
    """
    whole = held_by_kind(Attachments(), layout, activations)
    return _share(whole + worst_routing(plan, layout, activations).waiting, layout, activations)


def pending_share(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of a microbatch's activations held between its I and its W; arguments as for `held_by_kind`.

    Recomputation does not reduce it: everything was recomputed for the I. It is above 1 with experts, because gradients
    of their outputs wait too, and with adaptive levels, where more rows than the mean may come.
    """
    whole = held_by_kind(Attachments(), layout, activations)
    more = worst_routing(plan, layout, activations).waiting
    return _share(whole + more + _output_gradients(plan, whole), layout, activations)


def _output_gradients(plan: Attachments, held: Floats) -> Floats:
    """[stages, kinds of `WORK`] gradients of the experts' outputs, in the unit of the activations ``held``."""
    gradients = np.zeros_like(held)
    if is_sized(plan):
        assert plan.experts is not None
        top, most = plan.experts.top, worst_case_rows(plan)
        levels = [plan.recompute_of(stage) for stage in range(len(held))]
        mean = top * filled(plan)
        rows = np.array([most.experts if most and level.adaptive is not None else mean for level in levels])
        row = output_gradient_bytes(plan.experts, plan.dtype, 1) / layer_bytes(plan.experts, plan.dtype, filled(plan))
        gradients[:, MOE] = held[:, MOE] * rows[:, np.newaxis] * row
    return gradients


def _share(held: Floats, layout: Layout, activations: tuple[float, ...]) -> Floats:
    whole = held_by_kind(Attachments(), layout, activations).sum(1)
    return np.asarray(np.divide(held.sum(1), whole, out=np.ones(len(whole)), where=whole > 0))


@dataclass(frozen=True)
class WorstRouting:
    """Memory of a microbatch on adaptive stages in the worst case: as many rows come to a rank as can. 0 elsewhere.

    waiting: [stages, kinds of `WORK`] activations beyond those at the mean number of rows, none recomputed later.
    passing: [stages] temporaries of the one layer that runs. Both in the unit of the given activations.
    """

    waiting: Floats
    passing: Floats


def worst_routing(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> WorstRouting:
    """The worst case of a plan; 0 where it says too little (`check_memory` refuses that). Arguments: `held_by_kind`."""
    held = held_by_kind(Attachments(), layout, activations)
    waiting, passing = np.zeros_like(held), np.zeros(len(held))
    most = worst_case_rows(plan)
    adaptive = [stage for stage, level in enumerate(plan.recompute) if level.adaptive is not None]
    if most is None or not adaptive or not is_sized(plan):
        return WorstRouting(waiting, passing)
    assert plan.experts is not None
    whole = layer_bytes(plan.experts, plan.dtype, filled(plan))
    for kind in MOE:
        waiting[adaptive, kind] = held[adaptive, kind] * (whole_bytes(plan.experts, plan.dtype, most) / whole - 1)
        layer = np.where(layout.counts[adaptive, kind] > 0, activations[kind], 0.0)
        passing[adaptive] = np.maximum(passing[adaptive], layer * passing_bytes(plan.experts, plan.dtype, most) / whole)
    return WorstRouting(waiting, passing)


def share_until_recomputed(plan: Attachments, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of its activations that a microbatch with an R holds between its forward and the R.

    It is that of the stage's level; where the plan says none, that of `full`. NaN where the plan says neither a level
    nor the sizes of experts. Arguments as for `held_by_kind`.
    """
    levels = [plan.recompute_of(stage) for stage in range(len(layout.stages))]
    silent = np.array([level.level is Level.NONE for level in levels])
    assumed = tuple(Recompute(Level.FULL) if level.level is Level.NONE else level for level in levels)
    share = kept_share(replace(plan, recompute=assumed), layout, activations)
    experts = layout.counts[:, MOE].any(1) & is_sized(plan)
    return np.where(silent & ~experts, np.nan, share)
