"""The share of a stage's activations that belongs to segments of some roles: what leaves where a line names roles."""

from __future__ import annotations

from collections.abc import Collection

from schedc.attachments.layer_counts import counted_bytes
from schedc.attachments.recompute_bytes import held_by_role
from schedc.attachments.row_counts import filled
from schedc.ir.plan import HELD_ROLES, Level, Plan
from schedc.layout.parts import WITH_EXPERTS, WORK, Layout, PartKind, layers_in
from schedc.plan.level_shares import held_share, without_choices

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
    layers, sizes = layers_in(parts), without_choices(plan)
    held = sum(whole_of.get(part.kind, 0.0) for part in parts if part not in layers)
    of_roles = 0.0
    for part, level in zip(layers, recompute.of_layers_up_to(len(layers)), strict=True):
        left = whole_of[part.kind] * held_share(sizes, part.kind, level)
        held += left
        if part.kind not in WITH_EXPERTS:
            of_roles += left * ("dense" in roles)
        elif _OF_EXPERTS & set(roles):
            if recompute.adaptive is not None or counted_bytes(plan, True) is None:
                return None
            of_roles += left * _share_of_layer(plan, level, roles)
    return of_roles / held if held else 0.0


def _share_of_layer(plan: Plan, level: Level, roles: Collection[str]) -> float:
    """The share of what a MoE layer of a level holds."""
    assert plan.moe_sizes is not None, "its bytes are counted"
    by_role = held_by_role(plan.moe_sizes, plan.dtype, level, filled(plan))
    return sum(size for role, size in by_role.items() if role in roles) / sum(by_role.values())
