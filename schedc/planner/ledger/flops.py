"""Counts the FLOPs of a forward per token, by part: two for each product of two numbers, and nothing else.

Scores of attention: each of h heads multiplies a query with T keys, and sums T values, so 2 h (s + v) T with s columns
of a score and v of a value. T is the mean number of tokens that a token looks at. In a sequence of S tokens this is S,
or S/2 where attention is causal: the half of each score on the diagonal is left out. With a window of w it is
w - w^2/(2 S) where that is causal. Norms, activations, softmax and routing are no products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from schedc.planner.ledger.parameters import LedgerPart
from schedc.planner.model.values import AttentionKind, LayerKind, ModelSizes

FlopCounts = Mapping[LedgerPart, float]
"""FLOPs per token of a forward, by part; parts without any are left out."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a forward per token.

    head: those of the head. layers: [layers] of each layer. further: [mtp] of each layer that predicts a further token,
    with a head of its own.
    """

    head: float
    layers: tuple[FlopCounts, ...]
    further: tuple[FlopCounts, ...]

    @property
    def total(self) -> float:
        """FLOPs per token of everything but the layers that predict further tokens."""
        return self.head + sum(sum(layer.values()) for layer in self.layers)

    @property
    def mtp(self) -> float:
        """FLOPs per token of the layers that predict further tokens."""
        return float(sum(sum(layer.values()) for layer in self.further))

    @property
    def by_part(self) -> dict[LedgerPart, float]:
        """The sums over all layers. `mtp` has everything of its layers; the other parts are those of `total`."""
        together: Counter[LedgerPart] = Counter()
        for layer in self.layers:
            for part, flops in layer.items():
                together[part] += flops  # type: ignore[assignment]
        sums: dict[LedgerPart, float] = {**together, LedgerPart.HEAD: self.head, LedgerPart.MTP: self.mtp}
        return {part: sums[part] for part in LedgerPart if sums.get(part)}


@cache
def model_flops(model: ModelSizes, seq: int, causal: bool = True) -> ModelFlops:
    """FLOPs of a forward per token, in sequences of ``seq`` tokens."""
    head = 2.0 * model.hidden * model.vocab
    layers = tuple(layer_flops(model, layer, seq, causal) for layer in range(model.layers))
    further = tuple(layer_flops(model, model.layers + number, seq, causal) for number in range(model.mtp))
    return ModelFlops(head, layers, further)


def layer_flops(model: ModelSizes, layer: int, seq: int, causal: bool = True) -> FlopCounts:
    """FLOPs of a layer's forward per token, from 0. Layers from ``model.layers`` on predict further tokens."""
    return _layer(model, model.kind_of(layer), model.window_of(layer), seq, causal, layer >= model.layers)


@cache
def _layer(model: ModelSizes, kind: LayerKind, window: int, seq: int, causal: bool, further: bool) -> FlopCounts:
    hidden, moe = model.hidden, model.moe
    counts = {LedgerPart.ATTENTION: projection_flops(model) + score_flops(model, seen(seq, window, causal))}
    if kind is LayerKind.DENSE:
        counts[LedgerPart.DENSE] = 2.0 * (2 + model.gated) * hidden * model.ffn
    elif moe is not None:
        counts[LedgerPart.ROUTER] = 2.0 * hidden * moe.experts
        counts[LedgerPart.EXPERTS] = 6.0 * hidden * moe.width * moe.top
        if moe.shared:
            counts[LedgerPart.SHARED] = 6.0 * hidden * moe.width * moe.shared
    if further:
        counts[LedgerPart.MTP] = 4.0 * hidden**2
        counts[LedgerPart.HEAD] = 2.0 * hidden * model.vocab
    return counts


def projection_flops(model: ModelSizes) -> float:
    """FLOPs per token of the products in front of attention, and behind it."""
    sizes, hidden = model.attention, model.hidden
    h, g, d, v = sizes.heads, sizes.kv_heads, sizes.qk_dim, sizes.v_dim
    if sizes.kind is AttentionKind.MLA:
        wide = h * sizes.score_dim
        query = hidden * sizes.q_lora + sizes.q_lora * wide if sizes.q_lora else hidden * wide
        pairs = hidden * (sizes.kv_lora + sizes.rope_dim) + sizes.kv_lora * h * (d + v)
        return 2.0 * (query + pairs + h * v * hidden)
    return 2.0 * hidden * (h * d + g * (d + v) + h * v)


def score_flops(model: ModelSizes, tokens: float) -> float:
    """FLOPs per token of scores and sums over ``tokens`` tokens each."""
    sizes = model.attention
    return 2.0 * sizes.heads * (sizes.score_dim + sizes.v_dim) * tokens


def seen(seq: int, window: int, causal: bool) -> float:
    """Mean number of tokens that a token of a sequence looks at; window: 0 for none."""
    back = min(window, seq) if window else seq
    return back - back**2 / (2 * seq) if causal else float(back)
