"""Layouts of a model on the stages of a plan: even, or balanced over ranks or stages."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from schedc.ir.placement import Placement
from schedc.model.counts import layer_flops, model_flops
from schedc.model.sizes import LayerKind, ModelSizes
from schedc.plan.layout.even import even
from schedc.plan.layout.parts import WORK, Layout, Model, ModelPart, PartKind
from schedc.planner.price.plan_lines import dense_layers

_FIRST, _DENSE, _MOE, _MTP, _LAST = (WORK.index(kind) for kind in PartKind if kind in WORK)


def layout_of(model: ModelSizes, placement: Placement, name: str) -> Layout:
    """The layout of a name: `even`, `balanced`, `apart` or `ends`.

    It follows from the model and the places of its stages: neither a faster machine nor another split of ranks changes
    it, and a bound knows the stages of all plans of a placement.
    """
    if name == "balanced":
        return balanced_layout(model, placement)
    return {"even": even_layout, "apart": apart_layout, "ends": ends_layout}[name](model, placement.stages)


@lru_cache(maxsize=256)
def kind_flops(model: ModelSizes) -> tuple[float, ...]:
    """FLOPs of a token's forward in a part of each kind of `WORK`. The head makes the logits of predictions, too."""
    layers = {kind: layer_flops(model, model.kinds.index(kind), model.seq) for kind in set(model.kinds)}
    flops = {of: sum(layers[layer].values()) for of, layer in _LAYERS.items() if layer in layers}
    head = model_flops(model, model.seq).head
    if model.mtp:
        flops[PartKind.MTP] = sum(layer_flops(model, model.layers, model.seq).values()) - head
    flops[PartKind.HEAD] = head * (1.0 + model.mtp)
    return tuple(flops.get(kind, 0.0) for kind in WORK)


_LAYERS = {PartKind.DENSE: LayerKind.DENSE, PartKind.MOE: LayerKind.MOE}


def model_of(model: ModelSizes) -> Model:
    """The parts of a model, as layouts place them. Layers without experts come first, as `PlanSpace` asks for."""
    return Model(model.layers, dense_layers(model) if model.moe else None, model.mtp)


@lru_cache(maxsize=4096)
def even_layout(model: ModelSizes, stages: int) -> Layout:
    """As many layers in each stage, one more in the first ones where the stages do not divide them."""
    return even(model_of(model), stages)


def balanced_layout(model: ModelSizes, placement: Placement) -> Layout:
    """A layout whose ranks have about equally many FLOPs, predictions and head included.

    One layer after the other goes to the rank that has least, and there to the stage that has least. It takes less than
    a millisecond: searches want thousands. `balancing` proves its layouts the best, and takes a hundred times as long.
    """
    return _balanced(model, tuple(placement.rank_of_stage[0].tolist()))


@lru_cache(maxsize=4096)
def _balanced(model: ModelSizes, rank_of_stage: tuple[int, ...]) -> Layout:
    stages, dense, weights = len(rank_of_stage), dense_layers(model), kind_flops(model)
    layer = weights[_MOE if model.moe else _DENSE]
    of_stage = [0.0] * stages
    of_stage[0] += weights[_FIRST] + (dense * (weights[_DENSE] - layer) if model.moe else 0.0)
    of_stage[-1] += weights[_LAST] + model.mtp * weights[_MTP]
    of_rank = [0.0] * (max(rank_of_stage) + 1)
    for stage, rank in enumerate(rank_of_stage):
        of_rank[rank] += of_stage[stage]
    counts = [0] * stages
    for _ in range(model.layers):
        stage = min(range(stages), key=lambda at: (of_rank[rank_of_stage[at]], of_stage[at], at))
        counts[stage] += 1
        of_stage[stage] += layer
        of_rank[rank_of_stage[stage]] += layer
    return _of_counts(model_of(model), counts)


@lru_cache(maxsize=4096)
def apart_layout(model: ModelSizes, stages: int) -> Layout:
    """A layout whose stages have about equally many FLOPs, with predictions in a stage of their own or with layers.

    The head, which makes the logits of all predictions, is alone in the last stage. Stages that are alike matter where
    a rank has several and each waits for the next one.
    """
    dense, weights = dense_layers(model), kind_flops(model)
    layer = weights[_MOE if model.moe else _DENSE]
    of_stage = [0.0] * (stages - 1)
    of_stage[0] += weights[_FIRST] + (dense * (weights[_DENSE] - layer) if model.moe else 0.0)
    of_stage[-1] += model.mtp * weights[_MTP]
    counts = [0] * stages
    for _ in range(model.layers):
        stage = min(range(stages - 1), key=of_stage.__getitem__)
        counts[stage] += 1
        of_stage[stage] += layer
    return _of_counts(model_of(model), counts, stages - 2)


@lru_cache(maxsize=4096)
def ends_layout(model: ModelSizes, stages: int) -> Layout:
    """Equally many parts in each stage: embedding, layers, predictions and head count alike.

    Megatron-LM has such layouts by `account_for_embedding_in_pipeline_split` and its like for the loss. Stages must
    divide the parts.
    """
    parts = model_of(model)
    row = ModelPart(PartKind.EMBEDDING), *parts.decoder, *parts.predictions, ModelPart(PartKind.HEAD)
    width = len(row) // stages
    return Layout(tuple(row[stage * width : (stage + 1) * width] for stage in range(stages)))


def _of_counts(parts: Model, counts: list[int], predicts: int = -1) -> Layout:
    """The layout with so many layers in each stage. predicts: the stage of the predictions."""
    ends = np.cumsum(counts).tolist()
    rows = [parts.decoder[end - count : end] for end, count in zip(ends, counts, strict=True)]
    rows[0] = (ModelPart(PartKind.EMBEDDING), *rows[0])
    rows[predicts] = (*rows[predicts], *parts.predictions)
    rows[-1] = (*rows[-1], ModelPart(PartKind.HEAD))
    return Layout(tuple(rows))
