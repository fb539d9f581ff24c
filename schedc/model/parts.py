"""The table of parts: the products, vectors and saved tensors of each part of a layer. All counts are sums over rows.

A token has H columns, an MLP F inside, an expert w. Attention has h heads of queries and g of keys. A head has d
columns, and r more that carry the position: s together. A value has v columns; narrow vectors have q and l. Products
are columns x summed columns:

    attention   GQA: h d + g (d + v) x H; H x h v
                MLA: q x H, h s x q (or h s x H); l + r x H, h (d + v) x l; H x h v
    dense       2 F x H where it is gated, else F x H; H x F
    router      E x H
    experts     2 w x H, H x w; a token takes k of E. Shared ones alike
    mtp         H x 2 H in front of a layer that predicts a further token; three norms
    head        V x H
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Literal, NamedTuple

from schedc.model.levels import Level
from schedc.model.sizes import AttentionKind, LayerKind, ModelSizes


class PartName(StrEnum):
    """A part of a model that is counted on its own: parts of other names are sharded and priced in other ways."""

    EMBEDDING = "embedding"
    NORMS = "norms"
    ATTENTION = "attention"
    DENSE = "dense"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED = "shared"
    MTP = "mtp"
    HEAD = "head"


class WeightProduct(NamedTuple):
    """Rows times a matrix: n columns of a result, each a sum over k columns of a row.

    bias: numbers that are added. copies: matrices of this shape. taken: how many of them multiply a token.
    """

    n: int
    k: int
    bias: int = 0
    copies: int = 1
    taken: int = 1


class SavedTensor(NamedTuple):
    """A tensor that a layer holds for its backward.

    columns: numbers per token, or per row of an expert. dropped: the first level that does not hold it; None where
    every level does. since: the first level that holds it. per: whether its rows are tokens, rows of experts, or these
    rows as they arrive. size: bytes of a number; 0 for the type of activations.
    """

    name: str
    columns: int
    dropped: Level | None
    since: Level = Level.NONE
    per: Literal["token", "row", "arrived"] = "token"
    size: int = 0

    def saved_at(self, level: Level) -> bool:
        """Whether a level holds it."""
        return level in _holding(self.since, self.dropped)


class LayerPart(NamedTuple):
    """A part of a model. vectors: parameters of no product. saved: what it holds for its backward.

    scores: columns of a score and of a value, of all heads: attention multiplies them for each token that a token
    looks at. window: tokens that it looks back; 0 for all.
    """

    products: tuple[WeightProduct, ...] = ()
    vectors: int = 0
    saved: tuple[SavedTensor, ...] = ()
    scores: int = 0
    window: int = 0


Parts = Mapping[PartName, LayerPart]
"""Parts by name."""


def layer_parts(model: ModelSizes, layer: int) -> Parts:
    """The parts of a layer, from 0. Layers from ``model.layers`` on predict further tokens."""
    return parts_of(model, model.kind_of(layer), model.window_of(layer), layer >= model.layers)


@cache
def parts_of(model: ModelSizes, kind: LayerKind, window: int = 0, further: bool = False) -> Parts:
    """The parts of a layer of a kind. further: whether it predicts a further token."""
    parts = {PartName.ATTENTION: _attention(model, window), PartName.NORMS: _norms(model)}
    if kind is LayerKind.DENSE:
        parts[PartName.DENSE] = _dense(model)
    elif model.moe is not None:
        parts |= _moe(model)
    if further:
        parts[PartName.MTP] = LayerPart((WeightProduct(model.hidden, 2 * model.hidden),), 3 * _norm(model))
        parts[PartName.HEAD] = _head(model, copies=0)
    return parts


@cache
def outside_parts(model: ModelSizes) -> Parts:
    """The parts outside of layers."""
    return {
        PartName.EMBEDDING: LayerPart(vectors=(model.vocab + model.positions) * model.hidden),
        PartName.NORMS: LayerPart(vectors=_norm(model)),
        PartName.HEAD: _head(model, copies=0 if model.tied else 1),
    }


@cache
def _holding(since: Level, dropped: Level | None) -> frozenset[Level]:
    return frozenset(level for level in Level if since <= level and (dropped is None or level < dropped))


def _attention(model: ModelSizes, window: int) -> LayerPart:
    sizes, hidden = model.attention, model.hidden
    h, d, v, q, s = sizes.heads, sizes.qk_dim, sizes.v_dim, sizes.q_lora, sizes.score_dim
    mla = sizes.kind is AttentionKind.MLA
    pairs, narrow = (h, sizes.kv_lora + sizes.rope_dim) if mla else (sizes.kv_heads, sizes.kv_lora)
    queries, into = h * (s if mla else d), 0 if mla else pairs * (d + v)
    products = []
    if q:
        products += [WeightProduct(q, hidden, sizes.qkv_bias * q), WeightProduct(queries, q)]
    elif mla:
        products.append(WeightProduct(queries, hidden))
    else:
        into += queries
    if mla:
        products.append(WeightProduct(narrow, hidden, sizes.qkv_bias * narrow))
        products.append(WeightProduct(h * (d + v), sizes.kv_lora))
    else:
        products.append(WeightProduct(into, hidden, sizes.qkv_bias * into))
    products.append(WeightProduct(hidden, h * v, sizes.out_bias * hidden))
    vectors = q + sizes.kv_lora if mla else sizes.head_norms * 2 * d + sizes.sinks * h
    columns = {
        "query": h * s,
        "key": pairs * s,
        "value": pairs * v,
        "attention result": h * v,
        "input of MLP": hidden,
        "narrow query": q,
        "narrow keys": narrow,
        "heads before norms": sizes.head_norms * (h + pairs) * s,
        "results before norms": max(model.norms - 2, 0) * hidden,
    }
    saved = (SavedTensor(name, count, Level.LAYER) for name, count in columns.items())
    return LayerPart(tuple(products), vectors, (SavedTensor("input", hidden, None), *saved), h * (s + v), window)


def _norm(model: ModelSizes) -> int:
    return model.hidden * (1 + model.norm_bias)


def _norms(model: ModelSizes) -> LayerPart:
    sizes = model.attention
    columns = {
        "normed input": model.hidden,
        "normed input of MLP": model.hidden,
        "normed narrow query": sizes.q_lora,
        "normed narrow keys": sizes.kv_lora,
    }
    saved = tuple(SavedTensor(name, count, Level.NORM) for name, count in columns.items())
    return LayerPart(vectors=model.norms * _norm(model), saved=saved)


def _dense(model: ModelSizes) -> LayerPart:
    inner, into = model.ffn, (1 + model.gated) * model.ffn
    products = (
        WeightProduct(into, model.hidden, model.mlp_bias * into),
        WeightProduct(model.hidden, inner, model.mlp_bias * model.hidden),
    )
    saved = SavedTensor("MLP activation", inner, Level.ACT), SavedTensor("MLP products", into, Level.FULL)
    return LayerPart(products, saved=saved)


def _moe(model: ModelSizes) -> dict[PartName, LayerPart]:
    moe, hidden = model.moe, model.hidden
    assert moe is not None
    width, shared = moe.width, moe.shared * moe.width
    return {
        PartName.ROUTER: LayerPart(
            (WeightProduct(moe.experts, hidden, moe.bias * moe.experts),),
            saved=(SavedTensor("router scores", moe.experts, Level.LIGHT, size=4),),
        ),
        PartName.SHARED: LayerPart(
            (WeightProduct(2 * shared, hidden), WeightProduct(hidden, shared)),
            saved=(
                SavedTensor("shared activation", shared, Level.ACT),
                SavedTensor("shared products", 2 * shared, Level.MEDIUM),
            ),
        ),
        PartName.EXPERTS: LayerPart(
            (
                WeightProduct(2 * width, hidden, moe.bias * 2 * width, moe.experts, moe.top),
                WeightProduct(hidden, width, moe.bias * hidden, moe.experts, moe.top),
            ),
            saved=(
                SavedTensor("expert activation", width, Level.ACT, per="row"),
                SavedTensor("row", hidden, Level.LIGHT, per="row"),
                SavedTensor("expert products", 2 * width, Level.MEDIUM, per="row"),
                SavedTensor("arrived row", hidden, Level.FULL, since=Level.LIGHT, per="arrived"),
            ),
        ),
    }


def _head(model: ModelSizes, copies: int) -> LayerPart:
    return LayerPart((WeightProduct(model.vocab, model.hidden, copies=copies),))
