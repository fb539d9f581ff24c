"""Activations that the stages of a layout hold per microbatch under a plan's recomputation: amounts and shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.plan import By, Level, Plan, Recompute
from schedc.model.layer import RowsPerToken
from schedc.plan.counts.layers import counted_layer, held_share, layer_of_kind
from schedc.plan.counts.rows import worst_case_rows
from schedc.plan.layout.parts import WITH_EXPERTS, WORK, Layout, ModelPart, PartKind, layers_in

MOE = [WORK.index(kind) for kind in WITH_EXPERTS]
"""Indices into `WORK` of the kinds of parts that have experts."""


def held_by_kind(plan: Plan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages, kinds of `WORK`] activations that a microbatch holds under the plan's recomputation.

    The unit is that of ``activations``, which has one number per kind as `LayerCosts.activations`. Levels apply to
    layers whose sizes the plan says. An adaptive level counts with its worst case.
    """
    held = layout.counts[:, : len(WORK)] * np.array(activations, np.float64)
    for stage, recompute in enumerate(plan.recompute):
        held[stage] *= _held_shares(plan, recompute, layout.stages[stage])
    return np.asarray(held)


def _held_shares(plan: Plan, recompute: Recompute, parts: Sequence[ModelPart]) -> Floats:
    """[kinds of `WORK`] share of a stage's activations of each kind that a microbatch holds. parts: of the stage."""
    layers = layers_in(parts)
    levels = list(zip((part.kind for part in layers), recompute.of_layers_up_to(len(layers)), strict=True))
    shares = np.ones(len(WORK))
    for kind in dict(levels):
        own = Counter(level for other, level in levels if other is kind)
        held = [(_level_held(plan, kind, level, recompute), number) for level, number in own.items()]
        whole = own.total()
        shares[list(PartKind).index(kind)] = (
            held[0][0] if len(held) == 1 else sum(share * number for share, number in held) / whole
        )
    return shares


def _level_held(plan: Plan, kind: PartKind, level: Level, recompute: Recompute) -> float:
    """Share that a layer of a level holds; of an adaptive one the worst case."""
    layer = layer_of_kind(plan, kind)
    if recompute.adaptive is None:
        return held_share(layer, level)
    if plan.experts is None or kind not in WITH_EXPERTS or layer is None:
        return 1.0
    up_to = recompute.adaptive * plan.experts.top
    most = worst_case_rows(plan) or RowsPerToken(up_to, up_to)
    alone = recompute.level if recompute.by is By.RANK else None
    return layer.adaptive(recompute.adaptive, most, alone) / layer.held()


def saved_share(plan: Plan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of a microbatch's activations held from its forward on; arguments as for `held_by_kind`."""
    return _share(held_by_kind(plan, layout, activations), layout, activations)


def restored_share(plan: Plan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of a microbatch's activations held from its R on; arguments as for `held_by_kind`.

    With adaptive levels it is above 1 where more rows than the mean may come.
    """
    whole = held_by_kind(Plan(), layout, activations)
    return _share(whole + worst_routing(plan, layout, activations).waiting, layout, activations)


def pending_share(plan: Plan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of a microbatch's activations held between its I and its W; arguments as for `held_by_kind`.

    Recomputation does not reduce it: everything was recomputed for the I. It is above 1 with experts, because gradients
    of their outputs wait too, and with adaptive levels, where more rows than the mean may come.
    """
    whole = held_by_kind(Plan(), layout, activations)
    more = worst_routing(plan, layout, activations).waiting
    return _share(whole + more + _output_gradients(plan, whole), layout, activations)


def _output_gradients(plan: Plan, held: Floats) -> Floats:
    """[stages, kinds of `WORK`] gradients of the experts' outputs, in the unit of the activations ``held``."""
    gradients = np.zeros_like(held)
    if (layer := counted_layer(plan, True)) is not None:
        most, mean = worst_case_rows(plan), layer.rows.experts
        levels = [plan.recompute_of(stage) for stage in range(len(held))]
        rows = np.array([most.experts if most and level.adaptive is not None else mean for level in levels])
        gradients[:, MOE] = held[:, MOE] * rows[:, np.newaxis] * (layer.of_rows(1) / layer.held())
    return gradients


def _share(held: Floats, layout: Layout, activations: tuple[float, ...]) -> Floats:
    whole = held_by_kind(Plan(), layout, activations).sum(1)
    return np.asarray(np.divide(held.sum(1), whole, out=np.ones(len(whole)), where=whole > 0))


@dataclass(frozen=True)
class WorstRouting:
    """Memory of a microbatch on adaptive stages in the worst case: as many rows come to a rank as can. 0 elsewhere.

    waiting: [stages, kinds of `WORK`] activations beyond those at the mean number of rows, none recomputed later.
    passing: [stages] temporaries of the one layer that runs. Both in the unit of the given activations.
    """

    waiting: Floats
    passing: Floats


def worst_routing(plan: Plan, layout: Layout, activations: tuple[float, ...]) -> WorstRouting:
    """The worst case of a plan; 0 where it says too little (`check_memory` refuses that). Arguments: `held_by_kind`."""
    held = held_by_kind(Plan(), layout, activations)
    waiting, passing = np.zeros_like(held), np.zeros(len(held))
    most, layer = worst_case_rows(plan), counted_layer(plan, True)
    adaptive = [stage for stage, level in enumerate(plan.recompute) if level.adaptive is not None]
    if most is None or not adaptive or layer is None:
        return WorstRouting(waiting, passing)
    whole = layer.held()
    for kind in MOE:
        waiting[adaptive, kind] = held[adaptive, kind] * (layer.whole(most) / whole - 1)
        own = np.where(layout.counts[adaptive, kind] > 0, activations[kind], 0.0)
        passing[adaptive] = np.maximum(passing[adaptive], own * layer.passing(most) / whole)
    return WorstRouting(waiting, passing)


def share_until_recomputed(plan: Plan, layout: Layout, activations: tuple[float, ...]) -> Floats:
    """[stages] share of its activations that a microbatch with an R holds between its forward and the R.

    It is that of the stage's level; where the plan says none, that of `full`. NaN where the plan says neither a level
    nor the sizes of experts. Arguments as for `held_by_kind`.
    """
    levels = [plan.recompute_of(stage) for stage in range(len(layout.stages))]
    silent = np.array([level.level is Level.NONE for level in levels])
    assumed = tuple(Recompute(Level.FULL) if level.level is Level.NONE else level for level in levels)
    share = saved_share(replace(plan, recompute=assumed), layout, activations)
    experts = layout.counts[:, MOE].any(1) & (counted_layer(plan, True) is not None)
    return np.where(silent & ~experts, np.nan, share)
