"""Finds the nodes of a stage's graph that a level recomputes ahead of their backward, and how long that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.cell.program import Half
from schedc.cell.slices import sliced
from schedc.ir.plan import By, Level, Plan, Recompute
from schedc.model.layer import Layer, recomputed_share
from schedc.plan.counts.layers import counted_layer, time_share

EXPERTS = "experts"
REPLAYED = ("permute", "relay")
"""Segments whose outputs are only sent: they are recomputed where their exchange is repeated."""
SENDING = ("dispatch", *REPLAYED)


def recomputed_nodes_of(plan: Recompute, shape: StageShape) -> dict[int, float]:
    """The nodes that a level may recompute as steps of their own: node index -> share of its forward.

    Below `medium` there is too little to place: backward recomputes it where it needs it.
    """
    layers, places = {node.layer for node in shape.nodes if node.role == "dispatch"}, layers_of_nodes(shape)
    levels = [_levels_by_role(plan, plan.of_layer(place)) for place in places]
    return {
        index: recomputed_share(node.role, levels[index][node.role])
        for index, node in enumerate(shape.nodes)
        if node.role in levels[index] and node.layer in layers and index in shape.backward
    }


def _levels_by_role(plan: Recompute, level: Level) -> dict[str, Level]:
    """The level at which the nodes of a layer of this level are recomputed, by role."""
    placed = level >= Level.MEDIUM
    sends = level.exchanges or (plan.adaptive is not None and plan.by is By.GROUP)
    return {
        **({EXPERTS: Level.FULL if sends else level} if placed or sends else {}),
        **({"shared": level} if placed else {}),
        **({"attention": level} if level >= Level.LAYER else {}),
        **(dict.fromkeys(SENDING, Level.FULL) if sends else {}),
    }


def layers_of_nodes(shape: StageShape) -> tuple[int, ...]:
    """[nodes] the layer of the stage that each belongs to, from 0 in the order of the model; -1 for none.

    Nodes have numbers among the MoE layers, or among the dense ones.
    """
    numbers: dict[tuple[bool, int], int] = {}
    return tuple(
        numbers.setdefault((node.role == "dense", node.layer), len(numbers)) if node.layer >= 0 else -1
        for node in shape.nodes
    )


def with_recomputed(shape: StageShape, nodes: Mapping[int, float]) -> StageShape:
    """The graph in which exactly these nodes are recomputed; ``nodes``: node index -> share of its forward."""
    marked = (
        replace(node, recomputed=index in nodes, share=nodes.get(index, 1.0)) for index, node in enumerate(shape.nodes)
    )
    return StageShape(tuple(marked), shape.outputs)


def in_backwards(shapes: Sequence[StageShape], plan: Plan) -> tuple[StageShape, ...]:
    """[stages] graphs with the nodes that backwards without an R recompute, at the mean number of rows.

    A dense layer is one node, whose backward recomputes inside itself.
    """
    dense = counted_layer(plan, False)
    return tuple(_in_backward(shape, plan.recompute_of(stage), dense) for stage, shape in enumerate(shapes))


@lru_cache(maxsize=1024)
def _in_backward(shape: StageShape, level: Recompute, dense: Layer | None) -> StageShape:
    """The graph of a stage of this level. dense: the plan's dense layer."""
    marked, shares = with_recomputed(shape, _at_the_mean(level, shape)), _dense_nodes(level, shape, dense)
    inside = tuple(replace(node, inside=shares.get(index, 0.0)) for index, node in enumerate(marked.nodes))
    return StageShape(inside, shape.outputs) if shares else marked


def _dense_nodes(level: Recompute, shape: StageShape, dense: Layer | None) -> dict[int, float]:
    """The dense layers that a level recomputes: node index -> share of its forward, where the plan says its sizes."""
    if level.adaptive is not None or level.level is Level.NONE:
        return {}
    places = layers_of_nodes(shape)
    shares = {
        index: time_share(dense, level.of_layer(places[index]))
        for index, node in enumerate(shape.nodes)
        if node.role == "dense"
    }
    return {index: share for index, share in shares.items() if share}


def _at_the_mean(level: Recompute, shape: StageShape) -> dict[int, float]:
    """The nodes that are recomputed where all ranks have equally many rows: none with an adaptive level."""
    return recomputed_nodes_of(level, shape) if level.adaptive is None else {}


def in_recomputations(shapes: Sequence[StageShape], plan: Plan) -> tuple[StageShape, ...]:
    """[stages] graphs with the nodes that an R recomputes.

    They are those of the stage's level. Where the plan says none, they are those of `full` in a stage with exchanges,
    and all nodes in a stage without.
    """
    dense = counted_layer(plan, False)
    return tuple(_in_recomputation(shape, plan.recompute_of(stage), dense) for stage, shape in enumerate(shapes))


@lru_cache(maxsize=1024)
def _in_recomputation(shape: StageShape, level: Recompute, dense: Layer | None) -> StageShape:
    """The graph of a stage of this level. dense: the plan's dense layer."""
    unsaid = level.level is Level.NONE
    whole = unsaid and not any(node.exchange for node in shape.nodes)
    assumed = Recompute(Level.FULL) if unsaid else level
    nodes = dict.fromkeys(shape.backward, 1.0) if whole else _at_the_mean(assumed, shape)
    nodes |= {} if unsaid else _dense_nodes(level, shape, dense)
    return with_recomputed(shape, nodes)


def graphs_of(shapes: Sequence[StageShape], plan: Plan) -> tuple[tuple[StageShape, ...], tuple[StageShape, ...]]:
    """[stages] graphs as backwards without an R recompute them, and as Rs do; both in the plan's slices."""
    plain, again = (
        tuple(sliced(shape, plan.slices_of(stage)) for stage, shape in enumerate(marked))
        for marked in (in_backwards(shapes, plan), in_recomputations(shapes, plan))
    )
    return plain, again


def shares_of_forward(shapes: Sequence[StageShape], plan: Plan, costs: CellCosts) -> tuple[float, ...]:
    """[stages] time of an R as a share of its forward, both run node after node.

    1 where the R has no node, as below `medium`, or where the costs do not know its nodes.
    """
    shares = []
    for shape, marked in zip(shapes, in_recomputations(shapes, plan), strict=True):
        forward = sum(costs.duration(shape, Half.FORWARD, node) for node in range(len(shape)))
        recompute = sum(costs.duration(marked, Half.RECOMPUTE, node) for node in marked.recomputed)
        shares.append(recompute / forward if recompute else 1.0)
    return tuple(shares)
