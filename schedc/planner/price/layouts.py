"""Layouts of a model on the stages of a plan: even ones, and those that balance the ranks or the stages."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.placement import Placement
from schedc.model.sizes import ModelSizes
from schedc.plan.layout.even import even
from schedc.plan.layout.parts import WORK, Layout, Model, ModelPart, PartKind
from schedc.planner.price.plan_lines import dense_layers

_FIRST, _DENSE, _MOE, _MTP, _LAST = (WORK.index(kind) for kind in PartKind if kind in WORK)


def model_of(model: ModelSizes) -> Model:
    """The parts of a model, as layouts place them. Layers without experts come first, as `PlanSpace` asks for."""
    return Model(model.layers, dense_layers(model) if model.moe else None, model.mtp)


@lru_cache(maxsize=4096)
def even_layout(model: ModelSizes, stages: int) -> Layout:
    """As many layers in each stage, one more in the first ones where the stages do not divide them."""
    return even(model_of(model), stages)


def balanced_layout(model: ModelSizes, placement: Placement, weights: Floats) -> Layout:
    """A layout whose ranks have about equally much to do, embedding, predictions and head included.

    One layer after the other goes to the rank that has least, and there to the stage that has least. It takes less than
    a millisecond: searches want thousands. `balancing` proves its layouts the best, and takes a hundred times as long.
    weights: [kinds] of a part of each kind, in any unit; those of `WORK`.
    """
    places = tuple(placement.rank_of_stage[0].tolist())
    return _balanced(model, places, tuple(weights.tolist()))


@lru_cache(maxsize=4096)
def _balanced(model: ModelSizes, rank_of_stage: tuple[int, ...], weights: tuple[float, ...]) -> Layout:
    stages, dense = len(rank_of_stage), dense_layers(model)
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


def apart_layout(model: ModelSizes, stages: int, weights: Floats) -> Layout:
    """A layout whose stages have about equally much to do, with predictions in a stage of their own or with layers.

    The head, which makes the logits of all predictions, is alone in the last stage. Stages that are alike matter where
    a rank has several and each waits for the next one. weights: [kinds] as for `balanced_layout`.
    """
    return _apart(model, stages, tuple(weights.tolist()))


@lru_cache(maxsize=4096)
def _apart(model: ModelSizes, stages: int, weights: tuple[float, ...]) -> Layout:
    dense, layer = dense_layers(model), weights[_MOE if model.moe else _DENSE]
    of_stage = [0.0] * (stages - 1)
    of_stage[0] += weights[_FIRST] + (dense * (weights[_DENSE] - layer) if model.moe else 0.0)
    of_stage[-1] += model.mtp * weights[_MTP]
    counts = [0] * stages
    for _ in range(model.layers):
        stage = min(range(stages - 1), key=of_stage.__getitem__)
        counts[stage] += 1
        of_stage[stage] += layer
    return _of_counts(model_of(model), counts, stages - 2)


def _of_counts(parts: Model, counts: list[int], predicts: int = -1) -> Layout:
    """The layout with so many layers in each stage. predicts: the stage of the predictions."""
    ends = np.cumsum(counts).tolist()
    rows = [parts.decoder[end - count : end] for end, count in zip(ends, counts, strict=True)]
    rows[0] = (ModelPart(PartKind.EMBEDDING), *rows[0])
    rows[predicts] = (*rows[predicts], *parts.predictions)
    rows[-1] = (*rows[-1], ModelPart(PartKind.HEAD))
    return Layout(tuple(rows))
