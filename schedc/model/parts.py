"""The table of parts of a layer: products, vectors, saved tensors and exchanges. All counts are sums over its rows.

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

Tensor ranks split columns by heads, and a rank holds one head at least. A matrix that each rank has whole is one head.
Tensor ranks exchange rows behind attention, behind an MLP and behind the embedding. They share the rows that go to
experts, and exchange returned rows.
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


class Heads(NamedTuple):
    """Heads that tensor ranks split. each: columns of a head."""

    number: int
    each: int = 1


class SplitColumns(tuple[Heads, ...]):
    """Columns side by side, which tensor ranks split by heads."""

    __slots__ = ()

    @property
    def total(self) -> int:
        return sum(number * each for number, each in self)

    def on_rank(self, tp: int) -> float:
        """Columns of a tensor rank, which holds one head at least."""
        return sum(max(number / tp, min(number, 1)) * each for number, each in self)

    def copied(self, tp: int) -> int:
        """Columns that several of ``tp`` ranks hold: those of heads beside others, and no whole matrices."""
        if all(number == 1 for number, _ in self):
            return 0
        return sum(max(tp - number, 0) * each for number, each in self if number)


class WeightProduct(NamedTuple):
    """Rows times a matrix: n columns of a result, each a sum over k columns of a row.

    bias: numbers that are added. copies: matrices of this shape. taken: how many of them multiply a token. wide:
    whether it stays in 16 bits.
    """

    n: SplitColumns
    k: SplitColumns
    bias: int = 0
    copies: int = 1
    taken: int = 1
    wide: bool = False

    @property
    def size(self) -> int:
        """Numbers of a matrix."""
        return self.n.total * self.k.total


class SavedTensor(NamedTuple):
    """A tensor that a layer holds for its backward.

    columns: numbers per token, or per row of an expert. dropped: the first level that does not hold it; None where
    every level does. since: the first level with the tensor. per: whether its rows are tokens, rows of experts, or
    these rows as they arrive. size: bytes of a number; 0 for the type of activations.
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


class LayerExchange(StrEnum):
    """What ranks exchange in a forward of a part, and again in its backward."""

    TENSOR = "tensor"
    """Rows of a microbatch: an all-gather and a reduce-scatter, or one all-reduce."""
    CONTEXT = "context"
    """Keys and values, once around the context ranks."""
    DISPATCH = "dispatch"
    """Rows to the ranks of their experts."""
    COMBINE = "combine"
    """Rows back to the ranks of their tokens."""


class LayerPart(NamedTuple):
    """A part of a model. vectors: parameters of no product. saved: tensors held for the backward.

    scores: columns of a score and of a value, of all heads: attention multiplies them for each token that a token
    looks at. window: tokens to look back, 0 for all. chunked: a token looks back within its chunk of so many tokens.
    rows: operands of its products: the tokens of a tensor group, a tensor rank's share of them, or rows of experts.
    shards: ranks that share the parameters.
    """

    products: tuple[WeightProduct, ...] = ()
    vectors: int = 0
    saved: tuple[SavedTensor, ...] = ()
    scores: int = 0
    window: int = 0
    exchanges: tuple[LayerExchange, ...] = ()
    rows: Literal["token", "shared", "sent"] = "token"
    shards: Literal["tp", "ep"] = "tp"
    chunked: bool = False


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
        product = WeightProduct(_split(model.hidden), _whole(2 * model.hidden))
        parts[PartName.MTP] = LayerPart((product,), 3 * _norm(model))
        parts[PartName.HEAD] = _head(model, copies=0)
    return parts


@cache
def outside_parts(model: ModelSizes) -> Parts:
    """The parts outside of layers."""
    return {
        PartName.EMBEDDING: LayerPart(
            vectors=(model.vocab + model.positions) * model.hidden, exchanges=(LayerExchange.TENSOR,)
        ),
        PartName.NORMS: LayerPart(vectors=_norm(model)),
        PartName.HEAD: _head(model, copies=0 if model.tied else 1)._replace(vectors=model.head_bias * model.vocab),
    }


@cache
def all_parts(model: ModelSizes) -> Parts:
    """The parts of layers of any kind, without windows, and those outside of layers. Norms are those of a layer."""
    dense, experts = (parts_of(model, kind, further=True) for kind in LayerKind)
    return {**outside_parts(model), **experts, **dense, PartName.HEAD: outside_parts(model)[PartName.HEAD]}


@cache
def _holding(since: Level, dropped: Level | None) -> frozenset[Level]:
    return frozenset(level for level in Level if since <= level and (dropped is None or level < dropped))


def _whole(columns: int) -> SplitColumns:
    return SplitColumns((Heads(1, columns),))


def _split(heads: int, each: int = 1) -> SplitColumns:
    return SplitColumns((Heads(heads, each),))


def _attention(model: ModelSizes, window: int) -> LayerPart:
    sizes, hidden = model.attention, model.hidden
    h, d, v, q, s = sizes.heads, sizes.qk_dim, sizes.v_dim, sizes.q_lora, sizes.score_dim
    mla, biased, inputs = sizes.kind is AttentionKind.MLA, sizes.qkv_bias, _whole(hidden)
    pairs, narrow = (h, sizes.kv_lora + sizes.rope_dim) if mla else (sizes.kv_heads, sizes.kv_lora)
    into = [Heads(h, s if mla else d)]
    products = []
    if q:
        products.append(WeightProduct(_whole(q), inputs, biased * q))
    if q or mla:
        products.append(WeightProduct(SplitColumns(into), _whole(q) if q else inputs))
        into = []
    if mla:
        products.append(WeightProduct(_whole(narrow), inputs, biased * narrow))
        products.append(WeightProduct(_split(h, d + v), _whole(sizes.kv_lora)))
    else:
        own = SplitColumns((*into, Heads(pairs, d + v)))
        products.append(WeightProduct(own, inputs, biased * own.total))
    products.append(WeightProduct(inputs, _split(h, v), sizes.out_bias * hidden))
    norms = (sizes.head_norms and sizes.head_norm_weights) * 2 * d + sizes.wide_norms * (h + pairs) * d
    vectors = q + sizes.kv_lora if mla else norms + sizes.sinks * h
    columns = {
        "query": h * s,
        "key": pairs * s,
        "value": pairs * v,
        "attention result": h * v,
        "input of MLP": hidden * (not model.beside),
        "narrow query": q,
        "narrow keys": narrow,
        "heads before norms": (sizes.head_norms or sizes.wide_norms) * (h + pairs) * s,
        "results before norms": max(model.norms + model.unnormed - 2, 0) * hidden,
    }
    saved = SavedTensor("input", hidden, None), *(SavedTensor(name, n, Level.LAYER) for name, n in columns.items())
    exchanges = (LayerExchange.TENSOR, LayerExchange.CONTEXT)
    return LayerPart(tuple(products), vectors, saved, h * (s + v), window, exchanges, chunked=sizes.chunked)


def _norm(model: ModelSizes) -> int:
    return model.hidden * (model.norm_weights + model.norm_bias)


def _norms(model: ModelSizes) -> LayerPart:
    sizes = model.attention
    columns = {
        "normed input": model.hidden * (model.unnormed < 2),
        "normed input of MLP": model.hidden * (model.unnormed < 1),
        "normed narrow query": sizes.q_lora,
        "normed narrow keys": sizes.kv_lora,
    }
    saved = tuple(SavedTensor(name, count, Level.NORM) for name, count in columns.items())
    return LayerPart(vectors=model.norms * _norm(model), saved=saved)


def _dense(model: ModelSizes) -> LayerPart:
    inner, into = model.ffn, (1 + model.gated) * model.ffn
    tokens = _whole(model.hidden)
    products = (
        WeightProduct(_split(inner, 1 + model.gated), tokens, model.mlp_bias * into),
        WeightProduct(tokens, _split(inner), model.mlp_bias * model.hidden),
    )
    saved = SavedTensor("MLP activation", inner, Level.ACT), SavedTensor("MLP products", into, Level.FULL)
    return LayerPart(products, saved=saved, exchanges=(LayerExchange.TENSOR,))


def _moe(model: ModelSizes) -> dict[PartName, LayerPart]:
    moe, hidden = model.moe, model.hidden
    assert moe is not None
    width, shared, tokens = moe.width, moe.shared * moe.width, _whole(hidden)
    return {
        PartName.ROUTER: LayerPart(
            (WeightProduct(_whole(moe.experts), tokens, (moe.bias or moe.router_bias) * moe.experts, wide=True),),
            saved=(SavedTensor("router scores", moe.experts, Level.LIGHT, size=4),),
            rows="shared",
        ),
        PartName.SHARED: LayerPart(
            (
                WeightProduct(_split(shared, 2), tokens, moe.shared_bias * 2 * shared),
                WeightProduct(tokens, _split(shared), moe.shared_bias * (shared > 0) * hidden),
            ),
            moe.shared_gate * hidden,
            saved=(
                SavedTensor("shared activation", shared, Level.ACT),
                SavedTensor("shared products", 2 * shared, Level.MEDIUM),
            ),
        ),
        PartName.EXPERTS: LayerPart(
            (
                WeightProduct(_whole(2 * width), tokens, moe.bias * 2 * width, moe.experts, moe.top),
                WeightProduct(tokens, _whole(width), moe.bias * hidden, moe.experts, moe.top),
            ),
            saved=(
                SavedTensor("expert activation", width, Level.ACT, per="row"),
                SavedTensor("row", hidden, Level.LIGHT, per="row"),
                SavedTensor("expert products", 2 * width, Level.MEDIUM, per="row"),
                SavedTensor("arrived row", hidden, Level.FULL, since=Level.LIGHT, per="arrived"),
            ),
            exchanges=(LayerExchange.DISPATCH, LayerExchange.COMBINE, LayerExchange.TENSOR),
            rows="sent",
            shards="ep",
        ),
    }


def _head(model: ModelSizes, copies: int) -> LayerPart:
    return LayerPart((WeightProduct(_split(model.vocab), _whole(model.hidden), copies=copies, wide=True),))
