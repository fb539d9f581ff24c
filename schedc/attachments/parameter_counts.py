"""Counts the parameters of a MoE layer on a rank, from the sizes of a plan."""

from __future__ import annotations

from math import ceil

from schedc.attachments.plan_parts import moe_parts
from schedc.ir.plan import ExpertSizes, Plan, bytes_per_number
from schedc.model.counts import part_parameters
from schedc.model.parts import PartName


def expert_parameters(experts: ExpertSizes) -> int:
    """Parameters of the matrices of one expert."""
    return part_parameters(moe_parts(experts)[PartName.EXPERTS]) // experts.count


def moe_parameters(plan: Plan) -> int | None:
    """Parameters that a rank holds of one MoE layer: 3HF(E/R + s) of experts, and HE of the router.

    None where the plan does not say the columns H and F, or the R ranks that share the E experts. s: shared experts.
    Not in it is attention.
    """
    experts = plan.experts
    if experts is None or plan.topology is None or not (experts.width and experts.hidden):
        return None
    of_tokens = sum(part_parameters(moe_parts(experts)[name]) for name in (PartName.SHARED, PartName.ROUTER))
    return experts.count // plan.topology.ranks * expert_parameters(experts) + of_tokens


def moe_parameter_bytes(plan: Plan) -> int | None:
    """Bytes of `moe_parameters`: weights in the plan's dtype, and what its `states` say beside them."""
    count = moe_parameters(plan)
    return None if count is None else ceil(count * (bytes_per_number(plan.dtype) + plan.states))
