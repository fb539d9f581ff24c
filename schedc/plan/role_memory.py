"""The share of a stage's activations that belongs to segments of some roles: what leaves where a line names roles."""

from __future__ import annotations

from collections.abc import Collection

from schedc.ir.plan import HELD_ROLES, Level, Plan
from schedc.model.layer import Layer
from schedc.plan.counts.layers import held_share, layer_of_kind
from schedc.plan.layout.parts import WITH_EXPERTS, WORK, Layout, PartKind, layers_in

_OF_EXPERTS = set(HELD_ROLES) - {"dense"}


def share_of_roles(
    plan: Plan, layout: Layout, activations: tuple[float, ...], stage: int, roles: Collection[str]
) -> float | None:
    """The share of what a microbatch holds on a stage from its forward on, under the plan's recomputation.

    activations: as `LayerCosts.activations`. None where the plan does not say how much a role
    holds: without sizes of experts, or with an adaptive level.
    """
    recompute, parts = plan.recompute_of(stage), layout.stages[stage]
    whole_of: dict[PartKind, float] = dict(zip(WORK, activations, strict=True))
    layers = layers_in(parts)
    held = sum(whole_of.get(part.kind, 0.0) for part in parts if part not in layers)
    of_roles = 0.0
    for part, level in zip(layers, recompute.of_layers_up_to(len(layers)), strict=True):
        layer = layer_of_kind(plan, part.kind)
        saved = whole_of[part.kind] * held_share(layer, level)
        held += saved
        if part.kind not in WITH_EXPERTS:
            of_roles += saved * ("dense" in roles)
        elif _OF_EXPERTS & set(roles):
            if recompute.adaptive is not None or layer is None or plan.experts is None:
                return None
            of_roles += saved * _share_of_layer(layer, level, roles)
    return of_roles / held if held else 0.0


def _share_of_layer(layer: Layer, level: Level, roles: Collection[str]) -> float:
    """The share of what a MoE layer of a level holds."""
    by_role = layer.held_by_role(level)
    return sum(size for role, size in by_role.items() if role in roles) / sum(by_role.values())
