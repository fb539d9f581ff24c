"""Counts a block's attention and dense MLP in closed form: numbers held per token, and FLOPs of each level.

A token has H columns. Attention has h heads of d columns, r of them beside for rotated ones, and keys and values of g
heads. Where queries come from a narrow vector of q columns, or keys and values from one of l, both are held. A dense
MLP has F columns between its products: two that read a token where it is gated, else one. A block holds per token:

    attention   its input, what enters the MLP: 2 H; query h (d + r); value and result h d each, or g d of a value
    key         g (d + r), or h (d + r) from a narrow vector; narrow vectors q + l + r
    norms       their outputs: 2 H + q + l
    MLP         out of the first products 2 F, or F; out of the activation F

Without sizes of heads attention is counted as h d = H, g = h. FLOPs are those of products, two for a product of two
numbers. Scores are causal over the sequence, and not counted where the sequence is not known.
"""

from __future__ import annotations

from schedc.attachments.fusions import unfused_numbers
from schedc.attachments.held_tensors import ATTENTION, NORMS, columns, widths_of
from schedc.attachments.values import BlockSizes, Fuse, Level, bytes_per_number


def attention_numbers(block: BlockSizes, hidden: int) -> int:
    """Numbers per token that attention holds, and the inputs of both halves of its block."""
    return columns(ATTENTION, widths_of(block, hidden))


def norm_numbers(block: BlockSizes, hidden: int) -> int:
    """Numbers per token of the outputs of a block's norms."""
    return columns(NORMS, widths_of(block, hidden))


def attention_flops(block: BlockSizes, hidden: int) -> int:
    """FLOPs per token of attention's forward."""
    h, d, wide = block.heads_or(1), block.head_or(hidden), block.head_or(hidden) + block.rotary
    query = hidden * block.query + block.query * h * wide if block.query else hidden * h * wide
    pairs = (block.keys or h) * (wide + d)
    if block.latent:
        pairs = h * 2 * d
        products = query + hidden * (block.latent + block.rotary) + block.latent * pairs + h * d * hidden
    else:
        products = query + hidden * pairs + h * d * hidden
    return 2 * products + h * (wide + d) * block.sequence


def attention_bytes(block: BlockSizes, hidden: int, dtype: str, level: Level = Level.NONE) -> float:
    """Bytes per token that attention holds at a level, norms apart: those of the plan, or those of its numbers."""
    numbers = hidden if level >= Level.LAYER else attention_numbers(block, hidden)
    held = float(numbers * bytes_per_number(dtype))
    return held if not block.held else min(held, block.held) if level >= Level.LAYER else block.held


def dense_bytes(
    block: BlockSizes, hidden: int, dtype: str, level: Level = Level.NONE, fuse: Fuse | None = None
) -> float:
    """Bytes per token that a dense block holds at a level. fuse: of a plan; what it leaves out is held unfused."""
    attention = attention_bytes(block, hidden, dtype, level)
    if level >= Level.LAYER:
        return attention
    numbers = unfused_numbers(fuse, block, hidden, level)
    if level < Level.NORM:
        numbers += norm_numbers(block, hidden)
    if level < Level.ACT:
        numbers += block.inner
    if level < Level.FULL:
        numbers += (block.matrices - 1) * block.inner
    return attention + numbers * bytes_per_number(dtype)


def dense_flops(block: BlockSizes, hidden: int) -> int:
    """FLOPs per token of a dense block's forward."""
    return attention_flops(block, hidden) + mlp_flops(block, hidden)


def mlp_flops(block: BlockSizes, hidden: int) -> int:
    """FLOPs per token of a dense MLP, which `full` repeats as a whole. Lower levels repeat no product of it."""
    return 2 * block.matrices * hidden * block.inner
