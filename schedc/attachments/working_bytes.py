"""Bytes that a layer or a head takes while it runs, beyond what it holds for its backward, per token.

    tokens      gradients or values on their way between its parts: 4 H
    attention   gradients of query, key, value and result
    dense MLP   gradients between its products, and two temporaries of the activation
    rows        those of `recompute_bytes.passing_bytes`, with the rows as they arrive
    shared      as a dense MLP
    head        logits, and the same in four bytes; of a loss in chunks those of a chunk

Parts run one after the other, so that the largest counts. Not counted is what a kernel takes inside of itself, and what
collectives take beside the rows.
"""

from __future__ import annotations

from schedc.attachments.layer_counts import is_dense_sized, is_sized
from schedc.attachments.plan_parts import dense_parts
from schedc.attachments.recompute_bytes import RowsPerToken, passing_bytes
from schedc.attachments.row_counts import filled
from schedc.ir.plan import BlockSizes, Plan, bytes_per_number
from schedc.model.parts import PartName

_ON_THEIR_WAY = 4
"""Rows of H columns between the parts of a layer: its input and output, and those of the part that runs."""
_OF_HEADS = ("query", "key", "value", "attention result")
"""Tensors whose gradients attention computes at once."""
_WIDE = 4
"""Bytes of a number in which losses are formed."""


def working_bytes(plan: Plan, experts: bool) -> float | None:
    """Bytes per token of a MoE layer, or of a dense one, while it runs; None where its sizes are not known."""
    if experts and (sizes := plan.moe_sizes) is not None and is_sized(plan):
        rows = sizes.top * filled(plan)
        parts = passing_bytes(sizes, plan.dtype, RowsPerToken(rows, rows))
        shared = 5 * sizes.shared * sizes.width * bytes_per_number(plan.dtype)
        return _of_layer(plan, sizes.block, max(parts, shared))
    if not experts and (block := plan.block_sizes) is not None and is_dense_sized(plan):
        return _of_layer(plan, block, (block.matrices + 2) * block.inner * bytes_per_number(plan.dtype))
    return None


def _of_layer(plan: Plan, block: BlockSizes, largest: float) -> float:
    attention, size = dense_parts(block, plan.hidden)[PartName.ATTENTION], bytes_per_number(plan.dtype)
    heads = sum(tensor.columns for tensor in attention.held if tensor.name in _OF_HEADS)
    return _ON_THEIR_WAY * plan.hidden * size + max(largest, heads * size)


def arrived_bytes(plan: Plan) -> float:
    """Bytes per token of the rows of a MoE layer as they arrive: with their copies, once both have been recomputed."""
    experts = plan.moe_sizes
    return experts.top * filled(plan) * experts.hidden * bytes_per_number(plan.dtype) if experts else 0.0


def head_bytes(plan: Plan) -> float:
    """Bytes per token of the logits while the loss is formed; 0 where the plan does not say the columns."""
    if plan.loss is None or not plan.loss.vocab or not plan.tokens:
        return 0.0
    rows = plan.tokens if plan.loss.form == "whole" else min(plan.loss.chunk or plan.tokens, plan.tokens)
    return plan.loss.vocab * (_WIDE + bytes_per_number(plan.dtype)) * rows / plan.tokens
