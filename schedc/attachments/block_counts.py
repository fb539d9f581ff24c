"""Counts a block's attention and dense MLP per token: bytes held, and FLOPs of each level.

Without sizes of heads attention is counted as h d = H, g = h. FLOPs are those of products, two for a product of two
numbers. Scores are causal over the sequence, and not counted where the sequence is not known.
"""

from __future__ import annotations

from schedc.attachments.fusions import unfused_numbers
from schedc.attachments.plan_parts import dense_parts
from schedc.ir.plan import BlockSizes, Fuse, Level, bytes_per_number
from schedc.model.counts import part_bytes, product_flops
from schedc.model.parts import PartName


def attention_flops(block: BlockSizes, hidden: int) -> int:
    """FLOPs per token of attention's forward."""
    attention = dense_parts(block, hidden)[PartName.ATTENTION]
    return product_flops(attention) + attention.scores * block.sequence


def attention_bytes(block: BlockSizes, hidden: int, dtype: str, level: Level = Level.NONE) -> float:
    """Bytes per token that attention holds at a level, norms apart: those of the plan, or those of its numbers."""
    held = float(part_bytes(dense_parts(block, hidden)[PartName.ATTENTION], level, dtype))
    return held if not block.held else min(held, block.held) if level >= Level.LAYER else block.held


def dense_bytes(
    block: BlockSizes, hidden: int, dtype: str, level: Level = Level.NONE, fuse: Fuse | None = None
) -> float:
    """Bytes per token that a dense block holds at a level. fuse: of a plan; what it leaves out is held unfused."""
    attention = attention_bytes(block, hidden, dtype, level)
    if level >= Level.LAYER:
        return attention
    parts = dense_parts(block, hidden)
    unfused = unfused_numbers(fuse, block, hidden, level) * bytes_per_number(dtype)
    return attention + sum(part_bytes(parts[name], level, dtype) for name in (PartName.NORMS, PartName.DENSE)) + unfused


def dense_flops(block: BlockSizes, hidden: int) -> int:
    """FLOPs per token of a dense block's forward."""
    return attention_flops(block, hidden) + mlp_flops(block, hidden)


def mlp_flops(block: BlockSizes, hidden: int) -> int:
    """FLOPs per token of a dense MLP, which `full` repeats as a whole. Lower levels repeat no product of it."""
    return product_flops(dense_parts(block, hidden)[PartName.DENSE])
