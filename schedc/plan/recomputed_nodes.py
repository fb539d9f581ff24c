"""Recomputation as nodes of a stage's graph: which a level runs once more, ahead of their backward, and how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.cell.program import Half
from schedc.plan.recompute_bytes import recomputed_share
from schedc.plan.values import Attachments, By, Level, Recompute

EXPERTS = "experts"
REPLAYED = ("permute", "relay")
"""Segments whose outputs are only sent: worked out again so that they can be sent again."""
SENDING = ("dispatch", *REPLAYED)


def recomputed_nodes_of(plan: Recompute, shape: StageShape) -> dict[int, float]:
    """The nodes that may run once more, with how much of their forward.

    Below `medium` there is too little to place: it is worked out where backward asks for it.
    """
    placed = plan.level >= Level.MEDIUM
    sends = plan.level.exchanges or (plan.adaptive is not None and plan.by is By.GROUP)
    level_of = {
        **({EXPERTS: Level.FULL if sends else plan.level} if placed or sends else {}),
        **({"shared": plan.level} if placed else {}),
        **(dict.fromkeys(SENDING, Level.FULL) if sends else {}),
    }
    layers = {node.layer for node in shape.nodes if node.role == "dispatch"}
    return {
        at: recomputed_share(node.role, level_of[node.role])
        for at, node in enumerate(shape.nodes)
        if node.role in level_of and node.layer in layers and at in shape.backward
    }


def with_recomputed(shape: StageShape, nodes: Mapping[int, float]) -> StageShape:
    """The graph with these nodes, and no others, to be done once more, each with its share."""
    marked = (replace(node, recomputed=at in nodes, share=nodes.get(at, 1.0)) for at, node in enumerate(shape.nodes))
    return StageShape(tuple(marked), shape.outputs)


def in_backwards(shapes: Sequence[StageShape], plan: Attachments) -> tuple[StageShape, ...]:
    """[stages] the graphs with what the backwards of a plan do once more where they have no R, at the mean of rows."""
    levels = (plan.recompute_of(stage) for stage in range(len(shapes)))
    return tuple(
        with_recomputed(shape, _at_the_mean(level, shape)) for shape, level in zip(shapes, levels, strict=True)
    )


def _at_the_mean(level: Recompute, shape: StageShape) -> dict[int, float]:
    """The nodes that do run once more where all ranks have as many rows: with `adaptive` none."""
    return recomputed_nodes_of(level, shape) if level.adaptive is None else {}


def in_recomputations(shapes: Sequence[StageShape], plan: Attachments) -> tuple[StageShape, ...]:
    """[stages] the graphs with what an R does: the level of the stage, and where the plan says none, in a stage with
    exchanges that of `full`, and else all of it."""
    found = []
    for stage, shape in enumerate(shapes):
        level = plan.recompute_of(stage)
        silent = level.level is Level.NONE
        whole = silent and not any(node.exchange for node in shape.nodes)
        said = Recompute(Level.FULL) if silent else level
        nodes = dict.fromkeys(shape.backward, 1.0) if whole else _at_the_mean(said, shape)
        found.append(with_recomputed(shape, nodes))
    return tuple(found)


def shares_of_forward(shapes: Sequence[StageShape], plan: Attachments, costs: CellCosts) -> tuple[float, ...]:
    """[stages] how long an R takes, as a share of its forward, both one node after the other; 1 where it has no node,
    as below `medium`, or where the costs do not know the forward."""
    found = []
    for shape, marked in zip(shapes, in_recomputations(shapes, plan), strict=True):
        forward = sum(costs.duration(shape, Half.FORWARD, at) for at in range(len(shape)))
        again = sum(costs.duration(marked, Half.RECOMPUTE, at) for at in marked.recomputed)
        found.append(again / forward if again else 1.0)
    return tuple(found)
