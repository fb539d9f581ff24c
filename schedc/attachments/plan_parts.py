"""The parts of the layers that the lines of a plan describe; what a plan leaves unsaid has no columns."""

from __future__ import annotations

from functools import cache

from schedc.ir.plan import BlockSizes, ExpertSizes
from schedc.model.parts import Parts, parts_of
from schedc.model.sizes import AttentionKind, AttentionSizes, LayerKind, ModelSizes, MoeSizes


@cache
def dense_parts(block: BlockSizes, hidden: int) -> Parts:
    """The parts of a dense layer."""
    return parts_of(_sizes(block, hidden), LayerKind.DENSE)


@cache
def moe_parts(experts: ExpertSizes) -> Parts:
    """The parts of a MoE layer."""
    moe = MoeSizes(experts.count, experts.top, experts.width, shared=experts.shared)
    return parts_of(_sizes(experts.block, experts.hidden, moe), LayerKind.MOE)


def _sizes(block: BlockSizes, hidden: int, moe: MoeSizes | None = None) -> ModelSizes:
    """Without sizes of heads h d = hidden, and g = h. Every head of grouped keys has rotary columns of its own."""
    h, d = block.heads_or(1), block.head_or(hidden)
    if block.latent:
        attention = AttentionSizes(h, h, d, d, AttentionKind.MLA, block.query, block.latent, block.rotary)
    else:
        attention = AttentionSizes(h, block.keys or h, d + block.rotary, d, q_lora=block.query)
    return ModelSizes("", 1, hidden, 0, attention, block.inner, block.matrices == 3, moe)
