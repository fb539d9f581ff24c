"""Activations that the stages of a layout hold per microbatch under a plan's recomputation: amounts and shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.plan import HELD_ROLES, By, Level, Plan, Recompute
from schedc.model.layer import RowsPerToken
from schedc.plan.counts.layers import counted_layer, held_share, layer_of_kind
from schedc.plan.counts.rows import worst_case_rows
from schedc.plan.layout.parts import WITH_EXPERTS, WORK, Layout, ModelPart, PartKind, layers_in

MOE = [WORK.index(kind) for kind in WITH_EXPERTS]
"""Indices into `WORK` of the kinds of parts that have experts."""


@dataclass(frozen=True)
class WorstRouting:
    """Memory of a microbatch on adaptive stages in the worst case: as many rows come to a rank as can. 0 elsewhere.

    waiting: [stages, kinds of `WORK`] activations beyond those at the mean number of rows, none recomputed later.
    passing: [stages] temporaries of the running layer. Both in the unit of the given activations.
    """

    waiting: Floats
    passing: Floats


@dataclass(frozen=True, eq=False)
class StageActivations:
    """Activations of a microbatch on each stage under the recomputation of a plan.

    of_kinds: activations of a part of each kind without recomputation, as `LayerCosts.activations`; amounts have its
    unit. Levels apply to layers whose sizes the plan says. An adaptive level counts with its worst case.
    """

    plan: Plan
    layout: Layout
    of_kinds: tuple[float, ...]

    @cached_property
    def whole(self) -> Floats:
        """[stages, kinds of `WORK`] amounts without recomputation, at the mean number of rows."""
        return np.asarray(self.layout.shares * np.array(self.of_kinds, np.float64))

    @property
    def held(self) -> Floats:
        """[stages, kinds of `WORK`] amounts from the forward on."""
        held = self.whole.copy()
        for stage, recompute in enumerate(self.plan.recompute):
            held[stage] *= _held_shares(self.plan, recompute, self.layout.stages[stage])
        return held

    @property
    def saved(self) -> Floats:
        """[stages] share that is held from the forward on."""
        return self._share(self.held)

    @property
    def restored(self) -> Floats:
        """[stages] share that is held from an R on. With adaptive levels it is above 1 where more rows than the mean
        may come."""
        return self._share(self.whole + self.worst.waiting)

    @property
    def pending(self) -> Floats:
        """[stages] share that is held between an I and its W.

        Recomputation does not reduce it: everything was recomputed for the I. It is above 1 with experts, because
        gradients of their outputs wait too, and with adaptive levels, where more rows than the mean may come.
        """
        return self._share(self.whole + self.worst.waiting + self._output_gradients)

    @property
    def until_recomputed(self) -> Floats:
        """[stages] share that a microbatch with an R holds between its forward and the R.

        It is that of the stage's level; where the plan says none, that of `full`. NaN where the plan says neither a
        level nor the sizes of experts.
        """
        levels = self._levels
        silent = np.array([level.level is Level.NONE for level in levels])
        assumed = tuple(Recompute(Level.FULL) if level.level is Level.NONE else level for level in levels)
        share = replace(self, plan=replace(self.plan, recompute=assumed)).saved
        experts = self.layout.counts[:, MOE].any(1) & (counted_layer(self.plan, True) is not None)
        return np.where(silent & ~experts, np.nan, share)

    @cached_property
    def worst(self) -> WorstRouting:
        """The worst routing; 0 where the plan says too little (`check_memory` refuses that)."""
        waiting, passing = np.zeros_like(self.whole), np.zeros(len(self.whole))
        most, layer = worst_case_rows(self.plan), counted_layer(self.plan, True)
        adaptive = [stage for stage, level in enumerate(self.plan.recompute) if level.adaptive is not None]
        if most is None or not adaptive or layer is None:
            return WorstRouting(waiting, passing)
        whole = layer.held()
        for kind in MOE:
            waiting[adaptive, kind] = self.whole[adaptive, kind] * (layer.whole(most) / whole - 1)
            own = np.where(self.layout.counts[adaptive, kind] > 0, self.of_kinds[kind], 0.0)
            passing[adaptive] = np.maximum(passing[adaptive], own * layer.passing(most) / whole)
        return WorstRouting(waiting, passing)

    def share_of_roles(self, stage: int, roles: Collection[str]) -> float | None:
        """The share of a stage's activations, held from the forward on, that belongs to segments of some roles.

        None where the plan does not say how much a role holds: without sizes of experts, or with an adaptive level.
        """
        recompute, parts = self.plan.recompute_of(stage), self.layout.stages[stage]
        whole_of: dict[PartKind, float] = dict(zip(WORK, self.of_kinds, strict=True))
        layers = layers_in(parts)
        held = sum(whole_of.get(part.kind, 0.0) for part in parts if part not in layers)
        of_roles = 0.0
        for part, level in zip(layers, recompute.of_layers_up_to(len(layers)), strict=True):
            layer = layer_of_kind(self.plan, part.kind)
            saved = whole_of[part.kind] * held_share(layer, level)
            held += saved
            if part.kind not in WITH_EXPERTS:
                of_roles += saved * ("dense" in roles)
            elif _OF_EXPERTS & set(roles):
                if recompute.adaptive is not None or layer is None or self.plan.experts is None:
                    return None
                by_role = layer.held_by_role(level)
                named = sum(size for role, size in by_role.items() if role in roles)
                of_roles += saved * (named / sum(by_role.values()))
        return of_roles / held if held else 0.0

    @property
    def _levels(self) -> list[Recompute]:
        return [self.plan.recompute_of(stage) for stage in range(len(self.layout.stages))]

    @property
    def _output_gradients(self) -> Floats:
        """[stages, kinds of `WORK`] gradients of the experts' outputs."""
        gradients = np.zeros_like(self.whole)
        if (layer := counted_layer(self.plan, True)) is not None:
            most, mean = worst_case_rows(self.plan), layer.rows.experts
            rows = np.array([most.experts if most and each.adaptive is not None else mean for each in self._levels])
            gradients[:, MOE] = self.whole[:, MOE] * rows[:, np.newaxis] * (layer.of_rows(1) / layer.held())
        return gradients

    def _share(self, held: Floats) -> Floats:
        whole = self.whole.sum(1)
        return np.asarray(np.divide(held.sum(1), whole, out=np.ones(len(whole)), where=whole > 0))


_OF_EXPERTS = set(HELD_ROLES) - {"dense"}


def _held_shares(plan: Plan, recompute: Recompute, parts: Sequence[ModelPart]) -> Floats:
    """[kinds of `WORK`] share of a stage's activations of each kind that a microbatch holds. parts: of the stage."""
    layers = layers_in(parts)
    levels = Counter(zip((part.kind for part in layers), recompute.of_layers_up_to(len(layers)), strict=True))
    shares = np.ones(len(WORK))
    for kind in {kind for kind, _ in levels}:
        own = [(_level_held(plan, kind, level, recompute), n) for (other, level), n in levels.items() if other is kind]
        whole = sum(number for _, number in own)
        shares[WORK.index(kind)] = own[0][0] if len(own) == 1 else sum(share * number for share, number in own) / whole
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
