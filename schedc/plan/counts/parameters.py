"""The parameters of a MoE layer on a rank, from the sizes of a plan, and what the memory of a plan counts of them."""

from __future__ import annotations

from math import ceil
from typing import Any

from schedc.ir.plan import Plan, bytes_per_number
from schedc.model.counts import part_parameters
from schedc.model.parts import PartName
from schedc.plan.counts.layers import counted_layer
from schedc.plan.layout.parts import KIND_NAMES, WITH_EXPERTS, Layout
from schedc.syntax.plan import PlanTree


def expert_parameters(plan: Plan) -> int | None:
    """Parameters that a rank holds of one MoE layer without attention: 3HF(E/R + s) of experts, and HE of the router.

    None where the plan does not say the columns H and F, or the R ranks that share the E experts. s: shared experts.
    """
    layer, own = counted_layer(plan, True), _own_experts(plan)
    if layer is None or own is None:
        return None
    of_tokens = sum(part_parameters(layer.part(name)) for name in (PartName.SHARED, PartName.ROUTER))
    return own * layer.parameters_of_an_expert + of_tokens


def _own_experts(plan: Plan) -> int | None:
    return plan.experts.count // plan.topology.ranks if plan.experts and plan.topology else None


def expert_parameter_bytes(plan: Plan) -> int | None:
    """Bytes of `expert_parameters`: weights in the plan's dtype, and their `states`."""
    count = expert_parameters(plan)
    return None if count is None else ceil(count * (bytes_per_number(plan.dtype) + plan.states))


def expert_share(plan: Plan) -> float:
    """Share of `expert_parameters` that are experts' own; 1 where the plan does not say the sizes."""
    layer, own, count = counted_layer(plan, True), _own_experts(plan), expert_parameters(plan)
    return layer.parameters_of_an_expert * own / count if layer is not None and own is not None and count else 1.0


def parameter_facts(tree: PlanTree, plan: Plan, layout: Layout) -> dict[str, Any]:
    """``moe_layer`` and ``moe_layer_bytes``: experts and router of a layer on a rank; ``unknown``: counted as 0.

    ``states``: bytes of a parameter beside its weight; ``moe_layer_bytes`` includes them.
    Empty for a plan whose memory is not in bytes. What a ``parameters`` line gives is not among the unknown.
    """
    if not tree.in_bytes:
        return {}
    written = {entry.name for entry in tree.entries("parameters")}
    missing = [kind for kind in KIND_NAMES if layout.total(kind) and str(kind) not in written]
    count = expert_parameters(plan)
    derived = [kind for kind in missing if kind in WITH_EXPERTS and count is not None]
    unknown = ["attention"] * bool(derived) + [KIND_NAMES[kind] for kind in missing if kind not in derived]
    return {
        "parameters": {
            "moe_layer": count if derived else None,
            "moe_layer_bytes": expert_parameter_bytes(plan) if derived else None,
            "states": plan.states,
            "unknown": unknown,
        }
    }
