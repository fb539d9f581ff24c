"""The parameters of a MoE layer on a rank, from the sizes of a plan, and what the memory of a plan counts of them."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from schedc.ir.plan import Plan, bytes_per_number
from schedc.model.counts import part_parameters
from schedc.model.parts import PartName, parts_of
from schedc.plan.counts.layers import counted_layer
from schedc.plan.layout.parts import WITH_EXPERTS, PartKind


def expert_parameters(plan: Plan) -> int | None:
    """Parameters that a rank holds of one MoE layer without attention: 3HF(E/R + s) of experts, and HE of the router.

    None where the plan does not say the columns H and F, or the R ranks that share the E experts. s: shared experts.
    Ranks of tensor parallelism split the router and what every token takes.
    """
    return _of_rank(plan, (PartName.SHARED, PartName.ROUTER))


def layer_parameters(plan: Plan, kind: PartKind = PartKind.MOE) -> int | None:
    """Parameters that a rank holds of a MoE layer or of a prediction with one; None as for `expert_parameters`.

    They have attention and norms where the plan says the heads, and are else `expert_parameters`.
    """
    if not knows_attention(plan):
        return expert_parameters(plan)
    return _of_rank(plan, [name for name in PartName if name is not PartName.EXPERTS], kind is PartKind.MTP)


def knows_attention(plan: Plan) -> bool:
    """Whether the plan says the heads of attention, from which its parameters follow."""
    return plan.block is not None and plan.block.heads > 0


def _of_rank(plan: Plan, names: Collection[PartName], further: bool = False) -> int | None:
    """Parameters of these parts and of a rank's experts. further: of a layer that predicts a further token."""
    layer, experts = counted_layer(plan, True), _own_experts(plan)
    if layer is None or experts is None:
        return None
    parts = parts_of(layer.sizes, layer.kind, further=further)
    split = plan.parallel.tp if plan.parallel else 1
    return ceil(sum(part_parameters(parts[name], split) for name in names if name in parts) / split) + experts


def _own_experts(plan: Plan) -> int | None:
    """Parameters of the experts that a rank holds of a layer."""
    layer = counted_layer(plan, True)
    if layer is None or plan.experts is None or plan.topology is None:
        return None
    split = plan.parallel.expert_tp if plan.parallel else 1
    return ceil(plan.experts.count // plan.topology.ranks * layer.parameters_of_an_expert / split)


def parameter_bytes(plan: Plan) -> dict[str, float]:
    """Bytes of `layer_parameters` by kind: weights in the plan's dtype, and their `states`; empty if unknown."""
    counts = {kind: layer_parameters(plan, kind) for kind in WITH_EXPERTS}
    each = bytes_per_number(plan.dtype) + plan.states
    return {str(kind): float(ceil(count * each)) for kind, count in counts.items() if count is not None}


def expert_share(plan: Plan, kind: PartKind) -> float:
    """Share of `layer_parameters` that are experts' own; 0 for layers without experts, 1 where sizes are unknown."""
    if kind not in WITH_EXPERTS:
        return 0.0
    own, count = _own_experts(plan), layer_parameters(plan, kind)
    return own / count if own is not None and count else 1.0
