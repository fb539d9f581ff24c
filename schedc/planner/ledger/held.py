"""Names the tensors that a layer holds for its backward: bytes per token, and the level that no longer holds each.

The rows are those of `schedc.attachments.held_tensors`, by which plans are counted, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from schedc.attachments.held_tensors import ATTENTION, DENSE, NORMS, ROUTER, ROWS, SHARED, HeldTensor, LayerWidths
from schedc.attachments.values import Level, bytes_per_number
from schedc.planner.ledger.parameters import LedgerPart
from schedc.planner.model.values import AttentionKind, LayerKind, ModelSizes

_SCORE = 4
"""Bytes of a score of the router."""


@dataclass(frozen=True)
class HeldBytes:
    """A tensor that a layer holds.

    part: what it belongs to. bytes: bytes per token, with rows balanced between the experts. dropped: the first level
    that does not hold it; None where every level does.
    """

    name: str
    part: LedgerPart
    bytes: float
    dropped: Level | None


_PARTS: tuple[tuple[LedgerPart, tuple[HeldTensor, ...]], ...] = (
    (LedgerPart.ATTENTION, ATTENTION),
    (LedgerPart.NORMS, NORMS),
    (LedgerPart.DENSE, DENSE),
    (LedgerPart.ROUTER, ROUTER),
    (LedgerPart.SHARED, SHARED),
    (LedgerPart.EXPERTS, ROWS),
)
_ABSENT = {
    LayerKind.DENSE: {LedgerPart.ROUTER, LedgerPart.SHARED, LedgerPart.EXPERTS},
    LayerKind.MOE: {LedgerPart.DENSE},
}


@cache
def held_tensors(model: ModelSizes, kind: LayerKind, dtype: str = "bf16") -> tuple[HeldBytes, ...]:
    """The tensors that a layer of a kind holds without recomputation; those of no bytes are left out."""
    widths = layer_widths(model)
    rows = model.moe.top if model.moe else 0
    held = []
    for part, tensors in _PARTS:
        for tensor in tensors if part not in _ABSENT[kind] else ():
            numbers = tensor.columns(widths) * (rows if part is LedgerPart.EXPERTS else 1)
            if size := numbers * (_SCORE if tensor.scores else bytes_per_number(dtype)):
                held.append(HeldBytes(tensor.name, part, float(size), tensor.dropped))
    return tuple(held)


def held_bytes_of(model: ModelSizes, kind: LayerKind, level: Level = Level.NONE, dtype: str = "bf16") -> float:
    """Bytes per token that a layer of a kind holds at a level, with rows balanced between the experts.

    Rows that arrived are held in place of their copies at levels that make the copies anew, but do not dispatch again.
    """
    held = sum(x.bytes for x in held_tensors(model, kind, dtype) if x.dropped is None or level < x.dropped)
    if kind is LayerKind.MOE and model.moe and Level.LIGHT <= level < Level.FULL:
        held += model.moe.top * model.hidden * bytes_per_number(dtype)
    return held


@cache
def layer_widths(model: ModelSizes) -> LayerWidths:
    """Columns of a token at every place of the model's layers, dense and MoE alike."""
    sizes, moe = model.attention, model.moe
    mla = sizes.kind is AttentionKind.MLA
    pairs = sizes.heads if mla else sizes.kv_heads
    queries, keys = sizes.heads * sizes.score_dim, pairs * sizes.score_dim
    return LayerWidths(
        model.hidden,
        queries,
        keys,
        pairs * sizes.v_dim,
        sizes.heads * sizes.v_dim,
        sizes.q_lora,
        sizes.kv_lora,
        sizes.rope_dim if mla else 0,
        normed_heads=(queries + keys) * sizes.head_norms,
        behind=(model.norms - 2) * model.hidden if model.norms > 2 else 0,
        inner=model.ffn,
        matrices=2 + model.gated,
        experts=moe.experts if moe else 0,
        width=moe.width if moe else 0,
        shared=moe.shared * moe.width if moe else 0,
    )
