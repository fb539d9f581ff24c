"""Parameters, FLOPs and saved tensors of a model, part by part: sums over the table of parts.

FLOPs are those of a forward per token: two for each product of two numbers, and nothing else. A head of attention
multiplies a query with T keys, and sums T values. T is the mean number of tokens that a token looks at. In a sequence
of S tokens this is S, or S/2 where attention is causal: the half of each score on the diagonal is left out. With a
window of w it is w - w^2/(2 S) where that is causal. In chunks of w it is the mean over chunks, w/2 where they are
whole. Norms, activations, softmax, routing and the gate of shared experts are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

from schedc.model.levels import Level, bytes_per_number
from schedc.model.parts import LayerPart, PartName, Parts, layer_parts, outside_parts, parts_of
from schedc.model.sizes import LayerKind, ModelSizes

Counts = Mapping[PartName, int]
"""Parameters by part; parts with nothing are left out."""
FlopCounts = Mapping[PartName, float]
"""FLOPs per token of a forward, by part; parts without any are left out."""

Number = TypeVar("Number", int, float)


def part_parameters(part: LayerPart, tp: int = 1) -> int:
    """The parameters of a part on ``tp`` tensor ranks, summed. Each rank holds a head of keys at least."""
    copied = (each.n.copied(tp) * each.k.total for each in part.products) if tp > 1 else ()
    return part.vectors + sum(each.copies * (each.size + each.bias) for each in part.products) + sum(copied)


def product_flops(part: LayerPart) -> int:
    """FLOPs per token of the products of a part with its weights."""
    return 2 * sum(product.size * product.taken for product in part.products)


def part_flops(part: LayerPart, seq: int, causal: bool = True) -> float:
    """FLOPs per token of a part; seq: tokens of a sequence, 0 where scores are not counted."""
    return product_flops(part) + (2.0 * part.scores * seen(seq, part.window, causal, part.chunked) if seq else 0.0)


def part_bytes(part: LayerPart, level: Level, dtype: str, per: str = "token") -> int:
    """Bytes that a part holds at a level for each row of a kind: token, row of an expert, or arrived row."""
    size = bytes_per_number(dtype)
    return sum(x.columns * (x.size or size) for x in part.saved if x.per == per and x.saved_at(level))


def seen(seq: int, window: int, causal: bool, chunked: bool = False) -> float:
    """Mean number of tokens that a token of a sequence looks at. window: tokens of a window or chunk, 0 for none."""
    back = min(window, seq) if window else seq
    if chunked:
        squares = seq // back * back**2 + (seq % back) ** 2
        return squares / (2 * seq if causal else seq)
    return back - back**2 / (2 * seq) if causal else float(back)


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
    def by_part(self) -> dict[PartName, int]:
        """The sums over all layers. `mtp` has everything of its layers; the other parts are those of `total`."""
        return _by_part((self.outside, *self.layers), self.mtp)


@cache
def model_parameters(model: ModelSizes) -> ModelParameters:
    """The parameters of a model."""
    layers = tuple(layer_parameters(model, layer) for layer in range(model.layers))
    further = tuple(layer_parameters(model, model.layers + number) for number in range(model.mtp))
    idle = sum(layer.get(PartName.EXPERTS, 0) for layer in layers)
    if model.moe:
        idle = idle // model.moe.experts * (model.moe.experts - model.moe.top)
    return ModelParameters(_parameters(outside_parts(model)), layers, further, idle)


def layer_parameters(model: ModelSizes, layer: int, tp: int = 1) -> Counts:
    """The parameters of a layer, from 0. Layers from ``model.layers`` on predict further tokens. tp: tensor ranks."""
    return _parameters(layer_parts(model, layer), tp)


def without_experts(counts: Counts) -> tuple[int, int]:
    """Parameters that are no experts' own, and those of experts, which the ranks of an expert group share."""
    experts = counts.get(PartName.EXPERTS, 0)
    return sum(counts.values()) - experts, experts


def _parameters(parts: Parts, tp: int = 1) -> Counts:
    counts = {name: part_parameters(parts[name], tp) for name in PartName if name in parts}
    return {name: count for name, count in counts.items() if count}


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
    def by_part(self) -> dict[PartName, float]:
        """The sums over all layers. `mtp` has everything of its layers; the other parts are those of `total`."""
        return _by_part((*self.layers, {PartName.HEAD: self.head}), self.mtp)


@cache
def model_flops(model: ModelSizes, seq: int, causal: bool = True) -> ModelFlops:
    """FLOPs of a forward per token, in sequences of ``seq`` tokens."""
    layers = [layer_flops(model, layer, seq, causal) for layer in range(model.layers + model.mtp)]
    head = float(product_flops(outside_parts(model)[PartName.HEAD]))
    return ModelFlops(head, tuple(layers[: model.layers]), tuple(layers[model.layers :]))


def layer_flops(model: ModelSizes, layer: int, seq: int, causal: bool = True) -> FlopCounts:
    """FLOPs of a layer's forward per token, from 0. Layers from ``model.layers`` on predict further tokens."""
    parts = layer_parts(model, layer)
    counts = {name: part_flops(parts[name], seq, causal) for name in PartName if name in parts}
    return {name: count for name, count in counts.items() if count}


def _by_part(layers: tuple[Mapping[PartName, Number], ...], mtp: Number) -> dict[PartName, Number]:
    sums = {name: sum(layer.get(name, 0) for layer in layers) for name in PartName} | {PartName.MTP: mtp}
    return {name: count for name, count in sums.items() if count}


class SavedBytes(NamedTuple):
    """A tensor that a layer holds.

    part: what it belongs to. bytes: bytes per token, with rows balanced between the experts. dropped: the first level
    that does not hold it; None where every level does.
    """

    name: str
    part: PartName
    bytes: float
    dropped: Level | None


@cache
def saved_tensors(
    model: ModelSizes, kind: LayerKind, dtype: str = "bf16", level: Level = Level.NONE
) -> tuple[SavedBytes, ...]:
    """The tensors that a layer of a kind holds at a level; those of no bytes are left out."""
    rows = {"token": 1} | dict.fromkeys(("row", "arrived"), model.moe.top if model.moe else 0)
    return tuple(
        SavedBytes(x.name, name, float(count), x.dropped)
        for name, part in parts_of(model, kind).items()
        for x in part.saved
        if x.saved_at(level) and (count := x.columns * rows[x.per] * (x.size or bytes_per_number(dtype)))
    )
