"""What each level of recomputation leaves and costs, as shares of a layer: of its activations, and of its forward."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from schedc.attachments.layer_counts import counted_bytes, counted_flops, counted_saving
from schedc.ir.arrays import Floats
from schedc.ir.plan import Level, Plan
from schedc.layout.costs import LayerCosts, PerKind
from schedc.layout.parts import WITH_EXPERTS, WORK, Layout, PartKind, layers_in


def dense_activation_bytes(plan: Plan) -> float | None:
    """Bytes that a microbatch holds in one dense layer without recomputation; None where the plan says too little."""
    per_token = counted_bytes(plan, False)
    return per_token * plan.tokens if per_token and plan.tokens else None


def _has_experts(plan: Plan, kind: PartKind) -> bool:
    """Whether layers of a kind have experts; a prediction is a dense layer where the plan has no experts."""
    return kind in WITH_EXPERTS and (kind is not PartKind.MTP or plan.experts is not None)


@lru_cache(maxsize=256)
def held_share(plan: Plan, kind: PartKind, level: Level) -> float:
    """Share of the activations of a layer of this kind that a level holds; 1 where its sizes are not known."""
    experts = _has_experts(plan, kind)
    saved, whole = counted_saving(plan, experts, level), counted_bytes(plan, experts)
    return 1 - saved.bytes / whole if saved and whole else 1.0


@lru_cache(maxsize=256)
def time_share(plan: Plan, kind: PartKind, level: Level) -> float:
    """Recomputed FLOPs of a level over those of the layer's forward, a scalar; 0 where sizes are not known."""
    experts = _has_experts(plan, kind)
    saved, forward = counted_saving(plan, experts, level), counted_flops(plan, experts)
    return saved.flops / forward if saved and forward else 0.0


def recomputation_time(plan: Plan, layout: Layout, layers: LayerCosts, forward: Floats) -> Floats:
    """[stages] time that the backward of a microbatch recomputes for: the part of its forward by FLOPs.

    forward: [stages] time of a forward, which the parts of a stage share as ``layers`` says. 0 with adaptive levels,
    which recompute nothing where ranks have equally many rows.
    """
    time: dict[PartKind, float] = dict(zip(WORK, layers.time, strict=True))
    whole = np.array([sum(time.get(part.kind, 0.0) for part in stage) for stage in layout.stages], np.float64)
    again = recomputed_of_parts(plan, layout, layers.time)
    return np.divide(forward * again, whole, out=np.zeros(len(whole)), where=whole > 0)


def recomputed_of_parts(plan: Plan, layout: Layout, forward: PerKind) -> Floats:
    """[stages] time that the backward of a microbatch recomputes for: each layer's level has its share by FLOPs.

    forward: time of the forward of a layer of each kind. 0 with adaptive levels.
    """
    time: dict[PartKind, float] = dict(zip(WORK, forward, strict=True))
    again = np.zeros(len(layout.stages))
    for stage, recompute in enumerate(plan.recompute):
        parts = layers_in(layout.stages[stage])
        if recompute.adaptive is not None or recompute.level is Level.NONE:
            continue
        levels = recompute.of_layers_up_to(len(parts))
        again[stage] = sum(
            time[part.kind] * time_share(without_choices(plan), part.kind, level)
            for part, level in zip(parts, levels, strict=True)
        )
    return again


def without_choices(plan: Plan) -> Plan:
    """The part of a plan that shares follow from."""
    return Plan(
        plan.experts, plan.topology, plan.tokens, plan.dtype, plan.method, bound=plan.bound, block=plan.block,
        fuse=plan.fuse, attention=plan.attention,
    )  # fmt: skip
