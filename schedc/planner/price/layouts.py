"""Layouts of a model on the stages of a plan: even ones, and those that balance the ranks."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from schedc.ir.arrays import Floats
from schedc.ir.placement import Placement
from schedc.layout.balancing import balance
from schedc.layout.costs import LayerCosts, PerKind
from schedc.layout.even import even
from schedc.layout.parts import WORK, Layout, Model
from schedc.planner.model.values import ModelSizes
from schedc.planner.price.plan_lines import dense_layers

_DIGITS = 4
"""Digits of the times that layouts are balanced by: plans that differ in less share one."""


def model_of(model: ModelSizes) -> Model:
    """The parts of a model, as layouts place them. Layers without experts come first (`unplaceable`)."""
    return Model(model.layers, dense_layers(model) if model.moe else None, model.mtp)


def unplaceable(model: ModelSizes) -> str:
    """Why no plan can say where the layers of a model are; empty where one can."""
    kinds = model.kinds
    if model.moe and list(kinds) != sorted(kinds, key=lambda kind: kind.value):
        return "layers without experts follow layers with experts, and a plan has them in front"
    return ""


@lru_cache(maxsize=4096)
def even_layout(model: ModelSizes, stages: int) -> Layout:
    """As many layers in each stage, one more in the first ones where the stages do not divide them."""
    return even(model_of(model), stages)


def balanced_layout(model: ModelSizes, placement: Placement, times: Floats) -> Layout:
    """The layout with the least time of the fullest rank. times: [kinds] of one microbatch, in any unit."""
    most = max(float(times.max()), 1e-300)
    rounded = tuple(round(time / most, _DIGITS) for time in times.tolist())
    rows = tuple(map(tuple, placement.rank_of_stage.tolist()))
    return _balanced(model, rows, placement.ranks, rounded)


@lru_cache(maxsize=4096)
def _balanced(
    model: ModelSizes,
    rank_of_stage: tuple[tuple[int, ...], ...],
    ranks: int,
    times: tuple[float, ...],
) -> Layout:
    pipes = len(rank_of_stage)
    placement = Placement(np.array(rank_of_stage, np.int32), tuple(range(pipes + 1)), ranks)
    costs = LayerCosts(time=PerKind(**{str(kind): time for kind, time in zip(WORK, times, strict=True)}))
    return balance(model_of(model), placement, costs).layout
