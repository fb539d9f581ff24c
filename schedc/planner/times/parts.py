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

    def times(self, factor: Floats) -> PartTimes:
        """The times of so many of them."""
        return PartTimes(factor * self.forward, factor * self.input, factor * self.weight)


def dense_layer(runs: RunTable, constants: ConstantVectors) -> PartTimes:
    """A layer with a dense MLP."""
    part, scores = _attention(runs, constants)
    part += _products(runs, "dense", constants) + _elementwise(
        runs, constants, runs.once("dense.bytes", lambda: _activation_bytes(runs))
    )
    exchanged = 2.0 * tensor_exchange(runs, constants) + context_exchange(runs, constants)
    return _layer(runs, part, scores, exchanged, constants["launch"] + np.zeros((len(runs), 1)))


def moe_layer(runs: RunTable, constants: ConstantVectors) -> PartTimes:
    """A layer with experts. Rows go to experts and back in both directions."""
    part, scores = _attention(runs, constants)
    for segment in _expert_segments(runs, constants).values():
        part += segment
    exchanged = 2.0 * tensor_exchange(runs, constants) + context_exchange(runs, constants)
    rows = 2.0 * expert_exchange(runs, constants)
    left = np.where(runs.flag("attention_graphs"), constants["graphed"], 1.0) * np.where(
        runs.flag("hides_rows"), constants["pieces"], 1.0
    )
    layer = _layer(runs, part, scores, exchanged + rows, constants["launch"] * constants["moe_launch"] * left)
    return _beside(layer, rows, runs.flag("hides_rows"))


def moe_segments(runs: RunTable, constants: ConstantVectors) -> dict[str, PartTimes]:
    """The segments of a layer with experts, by the roles of cells, without the exchanges of rows between them.

    Exchanges between tensor and context ranks belong to ``attention``. The time by which launches are longer than
    their kernels is shared by all segments. Together with the exchanges they take the time of `moe_layer`.
    """
    attention, _ = _attention(runs, constants)
    exchanged = 2.0 * tensor_exchange(runs, constants) + context_exchange(runs, constants)
    own = {"attention": attention, **_expert_segments(runs, constants)}
    if "router" in own:
        own["attention"] += own.pop("router")
    own["attention"] += PartTimes(exchanged, exchanged, np.zeros_like(exchanged))
    whole, rows = moe_layer(runs, constants), 2.0 * expert_exchange(runs, constants)
    target = PartTimes(whole.forward - rows, whole.input - rows, whole.weight)

    def scaled(way: str) -> Floats:
        total = sum((getattr(part, way) for part in own.values()), np.zeros_like(rows))
        return np.asarray(np.divide(getattr(target, way), total, out=np.ones_like(total), where=total > 0))

    factors = {way: scaled(way) for way in ("forward", "input", "weight")}
    return {
        role: PartTimes(*(getattr(part, way) * factor for way, factor in factors.items())) for role, part in own.items()
    }


def head(runs: RunTable, constants: ConstantVectors) -> PartTimes:
    """The product with the vocabulary and the loss. No level recomputes them."""
    logits = runs.once("logits", lambda: runs.tokens * runs.size(lambda model: model.vocab) / runs.tp)
    loss = _moved(runs, constants, logits)
    part = _products(runs, "head", constants)
    return PartTimes(part.forward + 10.0 * loss, part.input + 8.0 * loss, part.weight)


def prediction(runs: RunTable, constants: ConstantVectors) -> PartTimes:
    """What a layer that predicts a further token takes beyond a layer of the model: its embedding, its projection.

    Two vectors of a token are normed and projected to one (DeepSeek-V3, arXiv 2412.19437, section 2.2). Its logits are
    made where the head is, which it shares.
    """
    norms = runs.once("mtp.bytes", lambda: 8.0 * runs.shared_rows * runs.hidden)
    return _products(runs, "mtp", constants) + _elementwise(runs, constants, norms) + embedding(runs, constants)


def embedding(runs: RunTable, constants: ConstantVectors) -> PartTimes:
    """The rows that are looked up, and summed over tensor ranks.

    Ranks with parts of a sequence scatter their rows forward, and gather gradients backward; others sum them forward.
    """
    looked, exchanged = _moved(runs, constants, 4.0 * runs.tokens * runs.hidden), tensor_exchange(runs, constants)
    back = np.where(runs.flag("sequence_parallel"), 0.5, 0.0) * exchanged
    return PartTimes(looked + exchanged - back, np.zeros_like(looked), 3.0 * looked + back)


# Products, by part.


def _expert_segments(runs: RunTable, constants: ConstantVectors) -> dict[str, PartTimes]:
    """What a layer with experts computes behind its attention; rows are permuted, and brought back by ``post``."""
    bytes = runs.once("moe.bytes", lambda: _expert_bytes(runs))
    segments = {role: _elementwise(runs, constants, bytes[role]) for role in bytes}
    for role in ("router", "shared", "experts"):
        products = _products(runs, role, constants)
        segments[role] = segments[role] + products if role in segments else products
    return segments


def _products(runs: RunTable, part: str, constants: ConstantVectors) -> PartTimes:
    works = runs.once(f"products.{part}", lambda: [directions(runs, product) for product in _PRODUCTS[part](runs)])
    none = np.zeros((len(runs), len(constants)))
    return PartTimes(*(sum((work[way].seconds(constants) for work in works), none) for way in range(3)))


def attention_products(runs: RunTable) -> Sequence[LayerProduct]:
    """The products in front of attention and behind it; with narrow vectors for MLA."""
    heads, kv = (
        runs.attention(lambda a: a.heads) / runs.tp,
        np.maximum(runs.attention(lambda a: a.kv_heads) / runs.tp, 1.0),
    )
    qk, rope, v = (runs.attention(of) for of in (lambda a: a.qk_dim, lambda a: a.rope_dim, lambda a: a.v_dim))
    q_lora, kv_lora = runs.attention(lambda a: a.q_lora), runs.attention(lambda a: a.kv_lora)
    rows, hidden, one = runs.tokens, runs.hidden, np.ones(len(runs))
    return (
        LayerProduct(rows, heads * qk + kv * (qk + v), hidden, one - runs.mla),
        LayerProduct(rows, q_lora, hidden, runs.mla),
        LayerProduct(rows, heads * (qk + rope), np.where(q_lora > 0, q_lora, hidden), runs.mla),
        LayerProduct(rows, kv_lora + rope, hidden, runs.mla),
        LayerProduct(rows, heads * (qk + v), kv_lora, runs.mla),
        LayerProduct(rows, hidden, heads * v, one),
    )


def _dense_products(runs: RunTable) -> Sequence[LayerProduct]:
    ffn, gated = runs.size(lambda model: model.ffn) / runs.tp, runs.size(lambda model: model.gated)
    one = np.ones(len(runs))
    return LayerProduct(runs.tokens, ffn * (1 + gated), runs.hidden, one), LayerProduct(
        runs.tokens, runs.hidden, ffn, one
    )


def _router_products(runs: RunTable) -> Sequence[LayerProduct]:
    experts = runs.expert(lambda moe: moe.experts)
    return (LayerProduct(runs.tokens / runs.tp, experts, runs.hidden, np.minimum(experts, 1.0), wide=True),)


def _shared_products(runs: RunTable) -> Sequence[LayerProduct]:
    shared = runs.expert(lambda moe: moe.shared * moe.width) / runs.tp
    there = np.minimum(runs.expert(lambda moe: moe.experts), 1.0)
    columns = 1.0 + runs.size(lambda model: model.gated)
    return (
        LayerProduct(runs.tokens, shared * columns, runs.hidden, there),
        LayerProduct(runs.tokens, runs.hidden, shared, there),
    )


def _expert_products(runs: RunTable) -> Sequence[LayerProduct]:
    width, columns = runs.expert(lambda moe: moe.width), 1.0 + runs.size(lambda model: model.gated)
    local = runs.expert(lambda moe: moe.experts) / runs.ep
    rows = sent_rows(runs) / np.maximum(local, 1.0)
    return (
        LayerProduct(rows, width * columns, runs.hidden, local, grouped=True),
        LayerProduct(rows, runs.hidden, width, local, grouped=True),
    )


def _head_products(runs: RunTable) -> Sequence[LayerProduct]:
    columns = runs.size(lambda model: model.vocab) / runs.tp
    return (LayerProduct(runs.tokens, columns, runs.hidden, np.ones(len(runs)), wide=True),)


def _mtp_products(runs: RunTable) -> Sequence[LayerProduct]:
    return (LayerProduct(runs.tokens, runs.hidden / runs.tp, 2.0 * runs.hidden, np.ones(len(runs))),)


_PRODUCTS = {
    "attention": attention_products,
    "dense": _dense_products,
    "router": _router_products,
    "shared": _shared_products,
    "experts": _expert_products,
    "head": _head_products,
    "mtp": _mtp_products,
}


def sent_rows(runs: RunTable) -> Floats:
    """[runs] rows that go to the experts of the fullest rank, for one microbatch and layer."""
    return runs.tokens / runs.tp * runs.expert(lambda moe: moe.top) * runs.column(lambda run: run.skew)


# What is not a product with weights.


def _moved(runs: RunTable, constants: ConstantVectors, bytes: Floats) -> Floats:
    return np.asarray((bytes / runs.hbm)[:, None] / constants["hbm"])


def _elementwise(runs: RunTable, constants: ConstantVectors, bytes: Floats) -> PartTimes:
    time = _moved(runs, constants, bytes)
    return PartTimes(time, _BACKWARD_BYTES * time, np.zeros_like(time))


def _activation_bytes(runs: RunTable) -> Floats:
    ffn, gated = runs.size(lambda model: model.ffn), runs.size(lambda model: model.gated)
    return runs.tokens * ffn / runs.tp * (4.0 + 2.0 * gated)


def _expert_bytes(runs: RunTable) -> dict[str, Floats]:
    """Rows are permuted and brought back; each expert has an activation; the router has scores.

    With biases, sums with them and the clamped activation are kernels of their own.
    """
    rows, width = sent_rows(runs), runs.expert(lambda moe: moe.width)
    scores = runs.tokens / runs.tp * runs.expert(lambda moe: moe.experts)
    gated, bias = runs.size(lambda model: model.gated), runs.expert(lambda moe: moe.bias)
    return {
        "router": 4.0 * scores,
        "permute": 4.0 * rows * runs.hidden,
        "experts": rows * (width * (4.0 + 2.0 * gated) + bias * (width * (4.0 + 16.0 * gated) + 4.0 * runs.hidden)),
        "post": 4.0 * rows * runs.hidden,
    }


def _norm_bytes(runs: RunTable) -> Floats:
    """Norms, two residuals, and the turned queries and keys."""
    norms, drop = runs.size(lambda model: model.norms), 1.0 * runs.flag("dropout")[:, 0]
    heads = runs.attention(lambda a: (a.heads + a.kv_heads) * a.score_dim) / runs.tp
    return runs.shared_rows * runs.hidden * (4.0 * norms + 12.0 + 2.0 * drop) + 4.0 * runs.tokens * heads


def _attention(runs: RunTable, constants: ConstantVectors) -> tuple[PartTimes, Floats]:
    """The attention of a layer, with the norms and residuals of the whole layer; and its scores forward."""
    forward, backward = _scores(runs, constants)
    part = _products(runs, "attention", constants) + _elementwise(
        runs, constants, runs.once("norm.bytes", lambda: _norm_bytes(runs))
    )
    return part + PartTimes(forward, backward, np.zeros_like(forward)), forward


def _score_sizes(runs: RunTable) -> tuple[Floats, Floats, Floats]:
    """[runs, 1] FLOPs of scores and weighted sums; scores that go through memory; whether heads are unaligned."""
    pairs = runs.tokens * runs.attended * runs.attention(lambda a: a.heads) / runs.tp
    fused = runs.flag("fused")[:, 0]
    wide = runs.attention(lambda a: a.score_dim + a.v_dim)
    flops = 2.0 * pairs * wide * np.where(fused, 0.5, 1.0)
    odd = runs.attention(lambda a: a.qk_dim % 8 > 0)
    return flops[:, None], np.where(fused, 0.0, pairs)[:, None], odd[:, None]


def _scores(runs: RunTable, constants: ConstantVectors) -> tuple[Floats, Floats]:
    """[runs, K] forward and backward. Scores that are not fused go through memory: 8 bytes forward, 12 backward."""
    flops, pairs, odd = runs.once("scores", lambda: _score_sizes(runs))
    compute = (
        flops / (runs.wide_peak[:, None] * constants["attention"]) * np.where(odd > 0, constants["unaligned"], 1.0)
    )
    moved = pairs / (runs.hbm[:, None] * constants["hbm"])
    dropped = 5.0 * runs.flag("dropout")
    backward = compute * np.where(runs.flag("fused"), _FUSED, _UNFUSED) + moved * (12.0 + dropped)
    return compute + moved * (8.0 + dropped), backward


def _layer(runs: RunTable, part: PartTimes, scores: Floats, exchanged: Floats, launch: Floats) -> PartTimes:
    """Adds exchanges, recomputed scores and launches. launch: [runs, K] seconds of launches in one direction."""
    launch = np.where(runs.flag("graphs"), 0.0, launch)
    forward = part.forward + exchanged
    recompute_seconds = np.where(runs.flag("recomputes_scores"), scores, 0.0)
    return PartTimes(
        _launched(forward, launch),
        _launched(part.input + exchanged + recompute_seconds, launch),
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
