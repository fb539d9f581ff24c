"""The layers that the lines of a plan describe: their sizes, and what each level of recomputation holds and takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.plan import BlockSizes, ExpertSizes, Level, Plan
from schedc.model.fusions import rows_of
from schedc.model.layer import Layer
from schedc.model.sizes import AttentionKind, AttentionSizes, LayerKind, ModelSizes, MoeSizes
from schedc.plan.counts.rows import arriving_rows, buffer_factor, expert_buffers
from schedc.plan.layout.costs import LayerCosts, PerKind
from schedc.plan.layout.parts import DECODER, WITH_EXPERTS, WORK, Layout, PartKind, layers_in

NO_TIMES: Mapping[tuple[str, str], float] = MappingProxyType({})
"""Costs that say no time of a level."""

DENSE_LEVELS = (Level.NONE, Level.NORM, Level.ACT, Level.FULL, Level.LAYER)
"""The levels that a dense layer has regions of; layers with experts have all."""


@lru_cache(maxsize=1024)
def sizes_of(experts: ExpertSizes | None, block: BlockSizes | None, hidden: int) -> ModelSizes:
    """The sizes that the lines `experts` and `block` say, with 0 for the unsaid. hidden: columns of a token.

    Without sizes of heads h d = hidden, and g = h. Every head of grouped keys has rotary columns of its own.
    """
    block = block or BlockSizes()
    h = block.heads or 1
    d = block.head or hidden // h
    if block.latent:
        attention = AttentionSizes(h, h, d, d, AttentionKind.MLA, block.query, block.latent, block.rotary)
    else:
        attention = AttentionSizes(h, block.keys or h, d + block.rotary, d, q_lora=block.query)
    windowed = (block.windowed or 1) if block.window else 0
    layers_back = tuple(range(windowed))
    attention = replace(attention, window=block.window, windowed=layers_back, chunked=bool(block.chunked))
    moe = None
    if experts is not None:
        moe = MoeSizes(experts.count, experts.top, experts.width, experts.groups, experts.limit, experts.shared)
    layers, gated = max(1, windowed + block.whole), block.matrices == 3
    sizes = ModelSizes("", layers, hidden, 0, attention, block.inner, gated, moe, seq=block.sequence)
    return replace(sizes, norms=2 - block.unnormed, unnormed=block.unnormed)


def moe_layer(plan: Plan, experts: ExpertSizes) -> Layer:
    """The MoE layer of a plan with these experts, whether or not it says their columns."""
    sizes = sizes_of(experts, plan.block, experts.hidden)
    buffers = buffer_factor(plan), arriving_rows(plan), expert_buffers(plan)
    return Layer(sizes, LayerKind.MOE, plan.dtype, plan.attention, None, *buffers)


def counted_layer(plan: Plan, experts: bool) -> Layer | None:
    """The MoE layer of a plan, or the dense one; None where the plan does not say its columns."""
    if experts:
        return moe_layer(plan, plan.experts) if plan.experts is not None and plan.has_expert_sizes else None
    if plan.block is None or not plan.has_dense_sizes:
        return None
    sizes, fused = sizes_of(None, plan.block, plan.hidden), rows_of(plan.fuse.names) if plan.fuse else None
    return Layer(sizes, LayerKind.DENSE, plan.dtype, plan.attention, fused)


def layer_of_kind(plan: Plan, kind: PartKind) -> Layer | None:
    """The layer of a kind of parts; a prediction is a dense layer where the plan has no experts."""
    return counted_layer(plan, kind in WITH_EXPERTS and (kind is not PartKind.MTP or plan.experts is not None))


def counted_activations(plan: Plan) -> dict[str, float]:
    """Bytes that a microbatch holds in a layer without recomputation, by kind of part; kinds of unknown sizes are left
    out."""
    layers = {kind: layer_of_kind(plan, kind) for kind in (*DECODER, PartKind.MTP) if plan.tokens}
    return {str(kind): layer.held() * plan.tokens for kind, layer in layers.items() if layer is not None}


@lru_cache(maxsize=1024)
def held_share(layer: Layer | None, level: Level) -> float:
    """Share of a layer's activations that a level holds; 1 where its sizes are not known."""
    whole = layer.held() if layer is not None else 0.0
    return 1 - layer.saving(level).bytes / whole if layer is not None and whole else 1.0


@lru_cache(maxsize=1024)
def time_share(layer: Layer | None, level: Level) -> float:
    """Recomputed FLOPs of a level over those of the layer's forward, a scalar; 0 where its sizes are not known."""
    forward = layer.flops if layer is not None else 0.0
    return layer.saving(level).flops / forward if layer is not None and forward else 0.0


def level_time(
    plan: Plan, kind: PartKind, level: Level, forward: float, known: Mapping[tuple[str, str], float]
) -> float:
    """Time, a scalar, that a layer recomputes for at a level: ``known`` by kind and level, else a share by FLOPs.

    forward: time of the layer's forward.
    """
    share = time_share(layer_of_kind(plan, kind), level)
    return known.get((kind, level), forward * share)


def recomputation_time(plan: Plan, layout: Layout, layers: LayerCosts, forward: Floats) -> Floats:
    """[stages] time that the backward of a microbatch recomputes for: the part of its forward by FLOPs.

    forward: [stages] time of a forward, which the parts of a stage share as ``layers`` says. 0 with adaptive levels,
    which recompute nothing where ranks have equally many rows.
    """
    time: dict[PartKind, float] = dict(zip(WORK, layers.time, strict=True))
    whole = np.array([sum(time.get(part.kind, 0.0) for part in stage) for stage in layout.stages], np.float64)
    again = recomputed_of_parts(plan, layout, layers.time)
    return np.divide(forward * again, whole, out=np.zeros(len(whole)), where=whole > 0)


def recomputed_of_parts(
    plan: Plan, layout: Layout, forward: PerKind, known: Mapping[tuple[str, str], float] = NO_TIMES
) -> Floats:
    """[stages] time that the backward of a microbatch recomputes for: each layer's level has its share by FLOPs.

    forward: time of the forward of a layer of each kind. known: times by kind and level that stand in place of shares.
    0 with adaptive levels.
    """
    time: dict[PartKind, float] = dict(zip(WORK, forward, strict=True))
    again = np.zeros(len(layout.stages))
    for stage, recompute in enumerate(plan.recompute):
        parts = layers_in(layout.stages[stage])
        if recompute.adaptive is not None or recompute.level is Level.NONE:
            continue
        alike = Counter(zip((part.kind for part in parts), recompute.of_layers_up_to(len(parts)), strict=True))
        for kind, level in sorted(alike, key=lambda each: (WORK.index(each[0]), each[1].place)):
            again[stage] += alike[kind, level] * level_time(plan, kind, level, time[kind], known)
    return again
