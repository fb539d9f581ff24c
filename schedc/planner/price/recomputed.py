"""What backwards recompute at each level: the nodes that cells recompute, for plans without pairs, too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from schedc.cell.costs import entries
from schedc.cell.recomputed import recomputed_nodes_of, repeats_inside
from schedc.cell.standard_blocks import stage_shape
from schedc.ir.arrays import Floats
from schedc.ir.plan import Level, Recompute
from schedc.planner.times.constants import ConstantVectors
from schedc.planner.times.parts import RepeatedSegments, repeated_layers
from schedc.planner.times.table import RunTable

LEVELS = (Level.NONE, Level.ACT, Level.MEDIUM, Level.FULL, Level.LAYER)
"""The levels of recomputation that plans differ in: those between them cost as much and hold more."""

EXCHANGES = np.array([float(level.exchanges) for level in LEVELS])
"""[levels] how often a backward sends rows to experts again."""

_SEGMENTS = frozenset({"attention", "permute", "experts", "shared", "post"})


@lru_cache(maxsize=16)
def repeated_segments(level: Level, behind: bool = True) -> RepeatedSegments:
    """What a level repeats of a layer with experts ahead of its backward.

    behind: whether the layer follows another one with experts, whose rows its attention brings back.
    """
    shape, layer = stage_shape(("moe", "moe")), int(behind)
    nodes = recomputed_nodes_of(Recompute(level), shape)
    shares = {
        role: share
        for index, share in nodes.items()
        if shape.nodes[index].layer == layer
        for role in entries(shape, index, _SEGMENTS)
    }
    return RepeatedSegments(shares, any(shape.nodes[index].exchange for index in nodes))


def expert_seconds(runs: RunTable, constants: ConstantVectors, again: Mapping[str, Floats]) -> Floats:
    """[rows, levels] seconds for which the backward of a layer with experts repeats, by `LEVELS`; zeros without any.

    Rows as of a table of parts. again: [rows] element-wise work that backwards repeat, by the roles of cells.
    """
    if all(run.model.moe is None for run in runs.each):
        return np.zeros((again["dense"].size, len(LEVELS)))
    seconds = repeated_layers(runs, constants, [repeated_segments(level) for level in LEVELS])
    return np.stack([each.ravel() for each in seconds], axis=1) + _inside(again, "attention", "experts")


def compute_of_cells(segments: Mapping[str, Floats], again: Mapping[str, Floats]) -> Floats:
    """[rows, levels] seconds of compute that cells repeat of a layer with experts, at least.

    segments: [3, rows] F, I and W by role. again: as for `expert_seconds`.
    """
    seconds = np.zeros((again["dense"].size, len(LEVELS)))
    for number, level in enumerate(LEVELS):
        for role, share in repeated_segments(level, behind=False).shares.items():
            if role in segments:
                seconds[:, number] += share * segments[role][0]
    return seconds + _inside(again, "attention", "experts")


def dense_seconds(shares: Floats, forward: Floats, again: Mapping[str, Floats]) -> Floats:
    """[rows, levels] seconds that the backward of a dense layer repeats. shares: [rows, levels] of its forward."""
    return np.asarray(shares * forward[:, None] + _inside(again, "dense"))


def _inside(again: Mapping[str, Floats], *roles: str) -> Floats:
    """[rows, levels] seconds of element-wise work that backwards of these roles repeat inside themselves."""
    marks = {role: np.array([float(repeats_inside(role, level)) for level in LEVELS]) for role in roles}
    return np.asarray(np.sum([again[role][:, None] * mark for role, mark in marks.items()], axis=0))
