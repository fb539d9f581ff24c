"""F, I and W of the parts of a model: a dense layer, a MoE layer, the embedding and the head, for many constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Bools, Floats
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.network import context_exchange, expert_exchange, tensor_exchange
from schedc.planner.times.products import LayerProduct, directions
from schedc.planner.times.table import RunTable

_BACKWARD_BYTES = 1.5
"""Bytes that elementwise kernels move backward, over those forward: they read a result and a gradient."""

_FUSED, _UNFUSED = 2.5, 2.0
"""Products of scores backward over those forward: fused kernels compute the scores again."""


@dataclass(frozen=True, eq=False)
class PartTimes:
    """[runs, K] seconds of a part for one microbatch: forward, input gradient, weight gradient."""

    forward: Floats
    input: Floats
    weight: Floats

    def __add__(self, other: PartTimes) -> PartTimes:
        return PartTimes(self.forward + other.forward, self.input + other.input, self.weight + other.weight)


def dense_layer(x: RunTable, c: ConstantVectors) -> PartTimes:
    """A layer with a dense MLP."""
    part, scores = _attention(x, c)
    part += _products(x, "dense", c) + _elementwise(x, c, x.once("dense.bytes", lambda: _activation_bytes(x)))
    exchanged = 2.0 * tensor_exchange(x, c) + context_exchange(x, c)
    return _layer(x, part, scores, exchanged, c["launch"] + np.zeros((len(x), 1)))


def moe_layer(x: RunTable, c: ConstantVectors) -> PartTimes:
    """A layer with experts. Rows go to experts and back in both directions."""
    part, scores = _attention(x, c)
    for segment in _expert_segments(x, c).values():
        part += segment
    exchanged = 2.0 * tensor_exchange(x, c) + context_exchange(x, c)
    rows = 2.0 * expert_exchange(x, c)
    left = np.where(x.flag("attention_graphs"), c["graphed"], 1.0) * np.where(x.flag("hides_rows"), c["pieces"], 1.0)
    layer = _layer(x, part, scores, exchanged + rows, c["launch"] * c["moe_launch"] * left)
    return _beside(layer, rows, x.flag("hides_rows"))


def moe_segments(x: RunTable, c: ConstantVectors) -> dict[str, PartTimes]:
    """The segments of a layer with experts, by the roles of cells, without the exchanges of rows between them.

    Exchanges between tensor and context ranks belong to ``attention``. The time by which launches are longer than
    their kernels is shared by all segments. Together with the exchanges they take the time of `moe_layer`.
    """
    attention, _ = _attention(x, c)
    exchanged = 2.0 * tensor_exchange(x, c) + context_exchange(x, c)
    own = {"attention": attention, **_expert_segments(x, c)}
    if "router" in own:
        own["attention"] += own.pop("router")
    own["attention"] += PartTimes(exchanged, exchanged, np.zeros_like(exchanged))
    whole, rows = moe_layer(x, c), 2.0 * expert_exchange(x, c)
    target = PartTimes(whole.forward - rows, whole.input - rows, whole.weight)

    def scaled(way: str) -> Floats:
        total = sum((getattr(part, way) for part in own.values()), np.zeros_like(rows))
        return np.asarray(np.divide(getattr(target, way), total, out=np.ones_like(total), where=total > 0))

    factors = {way: scaled(way) for way in ("forward", "input", "weight")}
    return {
        role: PartTimes(*(getattr(part, way) * factor for way, factor in factors.items())) for role, part in own.items()
    }


def head(x: RunTable, c: ConstantVectors) -> PartTimes:
    """The product with the vocabulary and the loss. No level recomputes them."""
    logits = x.once("logits", lambda: x.tokens * x.size(lambda model: model.vocab) / x.tp)
    loss = _moved(x, c, logits)
    part = _products(x, "head", c)
    return PartTimes(part.forward + 10.0 * loss, part.input + 8.0 * loss, part.weight)


def prediction(x: RunTable, c: ConstantVectors) -> PartTimes:
    """What a layer that predicts a further token takes beyond a layer of the model: its embedding, its projection.

    Two vectors of a token are normed and projected to one (DeepSeek-V3, arXiv 2412.19437, section 2.2). Its logits are
    made where the head is, which it shares.
    """
    norms = x.once("mtp.bytes", lambda: 8.0 * x.shared_rows * x.hidden)
    return _products(x, "mtp", c) + _elementwise(x, c, norms) + embedding(x, c)


def embedding(x: RunTable, c: ConstantVectors) -> PartTimes:
    """The rows that are looked up, and summed over tensor ranks.

    Ranks with parts of a sequence scatter their rows forward, and gather gradients backward; others sum them forward.
    """
    looked, exchanged = _moved(x, c, 4.0 * x.tokens * x.hidden), tensor_exchange(x, c)
    back = np.where(x.flag("sequence_parallel"), 0.5, 0.0) * exchanged
    return PartTimes(looked + exchanged - back, np.zeros_like(looked), 3.0 * looked + back)


# Products, by part.


def _expert_segments(x: RunTable, c: ConstantVectors) -> dict[str, PartTimes]:
    """What a layer with experts computes behind its attention; rows are permuted, and brought back by ``post``."""
    bytes = x.once("moe.bytes", lambda: _expert_bytes(x))
    segments = {role: _elementwise(x, c, bytes[role]) for role in bytes}
    for role in ("router", "shared", "experts"):
        products = _products(x, role, c)
        segments[role] = segments[role] + products if role in segments else products
    return segments


def _products(x: RunTable, part: str, c: ConstantVectors) -> PartTimes:
    works = x.once(f"products.{part}", lambda: [directions(x, product) for product in _PRODUCTS[part](x)])
    none = np.zeros((len(x), len(c)))
    return PartTimes(*(sum((work[way].seconds(c) for work in works), none) for way in range(3)))


def attention_products(x: RunTable) -> Sequence[LayerProduct]:
    """The products in front of attention and behind it; with narrow vectors for MLA."""
    heads, kv = x.attention(lambda a: a.heads) / x.tp, np.maximum(x.attention(lambda a: a.kv_heads) / x.tp, 1.0)
    qk, rope, v = (x.attention(of) for of in (lambda a: a.qk_dim, lambda a: a.rope_dim, lambda a: a.v_dim))
    q_lora, kv_lora = x.attention(lambda a: a.q_lora), x.attention(lambda a: a.kv_lora)
    rows, hidden, one = x.tokens, x.hidden, np.ones(len(x))
    return (
        LayerProduct(rows, heads * qk + kv * (qk + v), hidden, one - x.mla),
        LayerProduct(rows, q_lora, hidden, x.mla),
        LayerProduct(rows, heads * (qk + rope), np.where(q_lora > 0, q_lora, hidden), x.mla),
        LayerProduct(rows, kv_lora + rope, hidden, x.mla),
        LayerProduct(rows, heads * (qk + v), kv_lora, x.mla),
        LayerProduct(rows, hidden, heads * v, one),
    )


def _dense_products(x: RunTable) -> Sequence[LayerProduct]:
    ffn, gated = x.size(lambda model: model.ffn) / x.tp, x.size(lambda model: model.gated)
    one = np.ones(len(x))
    return LayerProduct(x.tokens, ffn * (1 + gated), x.hidden, one), LayerProduct(x.tokens, x.hidden, ffn, one)


def _router_products(x: RunTable) -> Sequence[LayerProduct]:
    experts = x.expert(lambda moe: moe.experts)
    return (LayerProduct(x.tokens / x.tp, experts, x.hidden, np.minimum(experts, 1.0), wide=True),)


def _shared_products(x: RunTable) -> Sequence[LayerProduct]:
    shared = x.expert(lambda moe: moe.shared * moe.width) / x.tp
    there = np.minimum(x.expert(lambda moe: moe.experts), 1.0)
    columns = 1.0 + x.size(lambda model: model.gated)
    return (
        LayerProduct(x.tokens, shared * columns, x.hidden, there),
        LayerProduct(x.tokens, x.hidden, shared, there),
    )


def _expert_products(x: RunTable) -> Sequence[LayerProduct]:
    width, columns = x.expert(lambda moe: moe.width), 1.0 + x.size(lambda model: model.gated)
    local = x.expert(lambda moe: moe.experts) / x.ep
    rows = sent_rows(x) / np.maximum(local, 1.0)
    return (
        LayerProduct(rows, width * columns, x.hidden, local, grouped=True),
        LayerProduct(rows, x.hidden, width, local, grouped=True),
    )


def _head_products(x: RunTable) -> Sequence[LayerProduct]:
    columns = x.size(lambda model: model.vocab) / x.tp
    return (LayerProduct(x.tokens, columns, x.hidden, np.ones(len(x)), wide=True),)


def _mtp_products(x: RunTable) -> Sequence[LayerProduct]:
    return (LayerProduct(x.tokens, x.hidden / x.tp, 2.0 * x.hidden, np.ones(len(x))),)


_PRODUCTS = {
    "attention": attention_products,
    "dense": _dense_products,
    "router": _router_products,
    "shared": _shared_products,
    "experts": _expert_products,
    "head": _head_products,
    "mtp": _mtp_products,
}


def sent_rows(x: RunTable) -> Floats:
    """[runs] rows that go to the experts of the fullest rank, for one microbatch and layer."""
    return x.tokens / x.tp * x.expert(lambda moe: moe.top) * x.column(lambda run: run.skew)


# What is not a product with weights.


def _moved(x: RunTable, c: ConstantVectors, bytes: Floats) -> Floats:
    return np.asarray((bytes / x.hbm)[:, None] / c["hbm"])


def _elementwise(x: RunTable, c: ConstantVectors, bytes: Floats) -> PartTimes:
    time = _moved(x, c, bytes)
    return PartTimes(time, _BACKWARD_BYTES * time, np.zeros_like(time))


def _activation_bytes(x: RunTable) -> Floats:
    ffn, gated = x.size(lambda model: model.ffn), x.size(lambda model: model.gated)
    return x.tokens * ffn / x.tp * (4.0 + 2.0 * gated)


def _expert_bytes(x: RunTable) -> dict[str, Floats]:
    """Rows are permuted and brought back; each expert has an activation; the router has scores.

    With biases, sums with them and the clamped activation are kernels of their own.
    """
    rows, width = sent_rows(x), x.expert(lambda moe: moe.width)
    scores = x.tokens / x.tp * x.expert(lambda moe: moe.experts)
    gated, bias = x.size(lambda model: model.gated), x.expert(lambda moe: moe.bias)
    return {
        "router": 4.0 * scores,
        "permute": 4.0 * rows * x.hidden,
        "experts": rows * (width * (4.0 + 2.0 * gated) + bias * (width * (4.0 + 16.0 * gated) + 4.0 * x.hidden)),
        "post": 4.0 * rows * x.hidden,
    }


def _norm_bytes(x: RunTable) -> Floats:
    """Norms, two residuals, and the turned queries and keys."""
    norms, drop = x.size(lambda model: model.norms), 1.0 * x.flag("dropout")[:, 0]
    heads = x.attention(lambda a: (a.heads + a.kv_heads) * a.score_dim) / x.tp
    return x.shared_rows * x.hidden * (4.0 * norms + 12.0 + 2.0 * drop) + 4.0 * x.tokens * heads


def _attention(x: RunTable, c: ConstantVectors) -> tuple[PartTimes, Floats]:
    """The attention of a layer, with the norms and residuals of the whole layer; and its scores forward."""
    forward, backward = _scores(x, c)
    part = _products(x, "attention", c) + _elementwise(x, c, x.once("norm.bytes", lambda: _norm_bytes(x)))
    return part + PartTimes(forward, backward, np.zeros_like(forward)), forward


def _score_sizes(x: RunTable) -> tuple[Floats, Floats, Floats]:
    """[runs, 1] FLOPs of scores and weighted sums; scores that go through memory; whether heads are unaligned."""
    pairs = x.tokens * x.attended * x.attention(lambda a: a.heads) / x.tp
    fused = x.flag("fused")[:, 0]
    wide = x.attention(lambda a: a.score_dim + a.v_dim)
    flops = 2.0 * pairs * wide * np.where(fused, 0.5, 1.0)
    odd = x.attention(lambda a: a.qk_dim % 8 > 0)
    return flops[:, None], np.where(fused, 0.0, pairs)[:, None], odd[:, None]


def _scores(x: RunTable, c: ConstantVectors) -> tuple[Floats, Floats]:
    """[runs, K] forward and backward. Scores that are not fused go through memory: 8 bytes forward, 12 backward."""
    flops, pairs, odd = x.once("scores", lambda: _score_sizes(x))
    compute = flops / (x.wide_peak[:, None] * c["attention"]) * np.where(odd > 0, c["unaligned"], 1.0)
    moved = pairs / (x.hbm[:, None] * c["hbm"])
    dropped = 5.0 * x.flag("dropout")
    backward = compute * np.where(x.flag("fused"), _FUSED, _UNFUSED) + moved * (12.0 + dropped)
    return compute + moved * (8.0 + dropped), backward


def _layer(x: RunTable, part: PartTimes, scores: Floats, exchanged: Floats, launch: Floats) -> PartTimes:
    """Adds exchanges, recomputation and launches. launch: [runs, K] seconds of launches in one direction."""
    launch = np.where(x.flag("graphs"), 0.0, launch)
    whole, some = x.flag("recomputes_layers"), x.flag("recomputes_scores")
    forward = part.forward + exchanged
    again = np.where(whole, forward, np.where(some, scores, 0.0))
    return PartTimes(
        _launched(forward, launch),
        _launched(part.input + exchanged + again, launch * np.where(whole, 2.0, 1.0)),
        _launched(part.weight, 0.5 * launch),
    )


def _beside(layer: PartTimes, rows: Floats, hides: Bools) -> PartTimes:
    """Hides exchanges of rows beside a forward and a backward of other microbatches, as far as these last."""
    left = PartTimes(layer.forward - rows, layer.input - rows, layer.weight)
    shown = np.maximum(0.0, 2.0 * rows - left.forward - left.input - left.weight) / 2.0
    return PartTimes(
        np.where(hides, left.forward + shown, layer.forward),
        np.where(hides, left.input + shown, layer.input),
        layer.weight,
    )


def _launched(device: Floats, launch: Floats) -> Floats:
    """The time of kernels that are launched while others run: the longer of both, with a smooth corner."""
    return np.asarray((device**4 + launch**4) ** 0.25)
