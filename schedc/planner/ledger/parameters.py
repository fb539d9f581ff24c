"""Counts the parameters of a model exactly, by part and by layer.

With H columns of a token, h heads of queries and g of keys with d columns, V words, F columns of an MLP, E experts:

    embedding   V H, and learned positions
    attention   GQA: (h + 2 g) d H in, h d H out
                MLA: H q + q h (n + r) of queries, H (l + r) + l h (n + v) of keys and values, h v H out; norms q + l
                and its biases, norms of heads, and sinks
    norms       H each, twice that with biases; and the norm in front of the head
    dense       3 H F where it is gated, else 2 H F
    router      H E
    experts     3 H F E; shared ones likewise
    mtp         2 H H and three norms in front of and behind each layer that predicts a further token
    head        V H, or nothing where it uses the embedding
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from schedc.planner.model.values import AttentionKind, LayerKind, ModelSizes


class LedgerPart(StrEnum):
    """A part of a model that is counted on its own: parts of other kinds are sharded and priced in other ways."""

    EMBEDDING = "embedding"
    NORMS = "norms"
    ATTENTION = "attention"
    DENSE = "dense"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED = "shared"
    MTP = "mtp"
    HEAD = "head"


Counts = Mapping[LedgerPart, int]
"""By part; parts with nothing are left out."""


@dataclass(frozen=True)
class ModelParameters:
    """The parameters of a model.

    outside: those outside of layers. layers: [layers] those of each layer. further: [mtp] those of the layers that
    predict further tokens, without copies of embedding and head. inactive: those of experts that a token does not take,
    of all layers.
    """

    outside: Counts
    layers: tuple[Counts, ...]
    further: tuple[Counts, ...]
    inactive: int

    @property
    def total(self) -> int:
        """All parameters but those that only predict further tokens."""
        return sum(self.outside.values()) + sum(sum(layer.values()) for layer in self.layers)

    @property
    def mtp(self) -> int:
        """Parameters that only predict further tokens."""
        return sum(sum(layer.values()) for layer in self.further)

    @property
    def active(self) -> int:
        """Parameters that a token passes, embedding and head included."""
        return self.total - self.inactive

    @property
    def by_part(self) -> dict[LedgerPart, int]:
        """The sums over all layers. `mtp` has everything of its layers; the other parts are those of `total`."""
        together: Counter[LedgerPart] = Counter(self.outside)
        for layer in self.layers:
            together.update(layer)
        together[LedgerPart.MTP] = self.mtp
        return {part: together[part] for part in LedgerPart if together[part]}


@cache
def model_parameters(model: ModelSizes) -> ModelParameters:
    """The parameters of a model."""
    layers = tuple(layer_parameters(model, layer) for layer in range(model.layers))
    further = tuple(layer_parameters(model, model.layers + number) for number in range(model.mtp))
    word = model.vocab * model.hidden
    outside = {
        LedgerPart.EMBEDDING: word + model.positions * model.hidden,
        LedgerPart.NORMS: _norm(model),
        LedgerPart.HEAD: 0 if model.tied else word,
    }
    idle = sum(layer.get(LedgerPart.EXPERTS, 0) for layer in layers)
    if model.moe:
        idle = idle // model.moe.experts * (model.moe.experts - model.moe.top)
    return ModelParameters(_without_zeros(outside), layers, further, idle)


def layer_parameters(model: ModelSizes, layer: int) -> Counts:
    """The parameters of a layer, from 0. Layers from ``model.layers`` on predict further tokens."""
    kind = model.kind_of(layer)
    return _of_mtp(model, kind) if layer >= model.layers else _of_kind(model, kind)


@cache
def _of_kind(model: ModelSizes, kind: LayerKind) -> Counts:
    counts = {LedgerPart.NORMS: model.norms * _norm(model), LedgerPart.ATTENTION: attention_parameters(model)}
    if kind is LayerKind.DENSE:
        counts[LedgerPart.DENSE] = _dense(model)
    elif (moe := model.moe) is not None:
        expert = 3 * model.hidden * moe.width
        counts[LedgerPart.ROUTER] = moe.experts * (model.hidden + moe.bias)
        counts[LedgerPart.EXPERTS] = moe.experts * (expert + moe.bias * (2 * moe.width + model.hidden))
        counts[LedgerPart.SHARED] = moe.shared * expert
    return _without_zeros(counts)


@cache
def _of_mtp(model: ModelSizes, kind: LayerKind) -> Counts:
    """A layer behind a projection of two normed inputs, and in front of a norm of its own (arXiv:2412.19437, 2.2)."""
    return {**_of_kind(model, kind), LedgerPart.MTP: 2 * model.hidden**2 + 3 * _norm(model)}


def attention_parameters(model: ModelSizes) -> int:
    """Parameters of the attention of one layer: products, biases, and norms of its own."""
    sizes, hidden = model.attention, model.hidden
    h, g, d, v = sizes.heads, sizes.kv_heads, sizes.qk_dim, sizes.v_dim
    out = h * v * hidden + sizes.out_bias * hidden
    if sizes.kind is AttentionKind.MLA:
        q, narrow, wide = sizes.q_lora, sizes.kv_lora + sizes.rope_dim, h * sizes.score_dim
        query = hidden * q + q + q * wide if q else hidden * wide
        pairs = hidden * narrow + sizes.kv_lora + sizes.kv_lora * h * (d + v)
        return query + pairs + out + sizes.qkv_bias * (q + narrow)
    into = h * d + g * (d + v)
    return into * (hidden + sizes.qkv_bias) + out + sizes.head_norms * 2 * d + sizes.sinks * h


def _dense(model: ModelSizes) -> int:
    into = 1 + model.gated
    return (into + 1) * model.hidden * model.ffn + model.mlp_bias * (into * model.ffn + model.hidden)


def _norm(model: ModelSizes) -> int:
    return model.hidden * (1 + model.norm_bias)


def _without_zeros(counts: Mapping[LedgerPart, int]) -> Counts:
    return {part: count for part, count in counts.items() if count}
