"""Marks the nodes of stages' graphs that a plan recomputes ahead of their backward, and says how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.cell.program import Half
from schedc.cell.recomputed import layers_of_nodes, recomputed_nodes_of, repeats_inside, with_recomputed
from schedc.cell.slices import sliced
from schedc.ir.plan import Level, Plan, Recompute
from schedc.model.layer import Layer
from schedc.plan.counts.layers import counted_layer, time_share


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
    again = _repeating(level, shape)
    inside = tuple(
        replace(node, inside=shares.get(index, 0.0), again=index in again) for index, node in enumerate(marked.nodes)
    )
    return StageShape(inside, shape.outputs) if shares or again else marked


def _repeating(level: Recompute, shape: StageShape) -> frozenset[int]:
    """The nodes whose backwards repeat element-wise work."""
    if level.adaptive is not None:
        return frozenset()
    places = layers_of_nodes(shape)
    return frozenset(
        index
        for index, node in enumerate(shape.nodes)
        if places[index] >= 0 and repeats_inside(node.role, level.of_layer(places[index]))
    )


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

    The stage's level decides. Without a level, `full` decides in a stage with exchanges, and an R recomputes all nodes
    in a stage without.
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
        tuple(sliced(shape, plan.row_slices[stage] if plan.row_slices else 1) for stage, shape in enumerate(marked))
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
