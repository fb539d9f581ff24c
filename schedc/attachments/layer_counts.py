"""What a plan counts of a layer per token: bytes that it holds, FLOPs of its forward, and what a level saves and costs.

``experts`` says which of the two kinds of layers it is: a MoE layer, or a dense one.
"""

from __future__ import annotations

from schedc.attachments.block_counts import attention_flops, dense_bytes, dense_flops, mlp_flops
from schedc.attachments.recompute_bytes import Saving, forward_flops, layer_bytes, saving
from schedc.attachments.row_counts import arriving_rows, filled
from schedc.ir.plan import Level, Plan


def is_sized(plan: Plan) -> bool:
    """Whether the plan says the columns of an expert and of a token."""
    return plan.experts is not None and bool(plan.experts.width and plan.experts.hidden)


def is_dense_sized(plan: Plan) -> bool:
    """Whether the plan says the sizes of a dense layer."""
    return plan.block is not None and bool(plan.block.inner and plan.hidden)


def counted_bytes(plan: Plan, experts: bool) -> float | None:
    """Bytes that a layer holds without recomputation; None where its sizes are not known."""
    if experts and (sizes := plan.moe_sizes) is not None and is_sized(plan):
        return layer_bytes(sizes, plan.dtype, filled(plan))
    if not experts and (block := plan.block_sizes) is not None and is_dense_sized(plan):
        return dense_bytes(block, plan.hidden, plan.dtype, fuse=plan.fuse)
    return None


def counted_flops(plan: Plan, experts: bool) -> float | None:
    """FLOPs of a layer's forward; None where its sizes are not known."""
    if experts and (sizes := plan.moe_sizes) is not None and is_sized(plan):
        return forward_flops(sizes, filled(plan))
    if not experts and (block := plan.block_sizes) is not None and is_dense_sized(plan):
        return dense_flops(block, plan.hidden)
    return None


def counted_saving(plan: Plan, experts: bool, level: Level) -> Saving | None:
    """What a level saves of a layer, and its FLOPs; None where the layer's sizes are not known."""
    if experts and (sizes := plan.moe_sizes) is not None and is_sized(plan):
        return saving(sizes, plan.dtype, level, arriving_rows(plan), filled(plan))
    if not experts and (block := plan.block_sizes) is not None and is_dense_sized(plan):
        held = (dense_bytes(block, plan.hidden, plan.dtype, each, plan.fuse) for each in (Level.NONE, level))
        flops = mlp_flops(block, plan.hidden) if level >= Level.FULL else 0
        flops += attention_flops(block, plan.hidden) if level >= Level.LAYER else 0
        return Saving(next(held) - next(held), flops)
    return None
