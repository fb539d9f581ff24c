"""Finds the nodes of a stage's graph that a level recomputes ahead of their backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from schedc.cell.graph import StageShape
from schedc.ir.plan import By, Level, Recompute
from schedc.model.levels import recomputed_share

EXPERTS = "experts"
REPLAYED = ("permute", "relay")
"""Segments whose outputs are only sent: a repeated exchange recomputes them."""
SENDING = ("dispatch", *REPLAYED)
INSIDE_CORES = ("feature", "keys")
"""Exchanges inside of attentions: columns of all tensor ranks, and keys and values of all context ranks."""


def recomputed_nodes_of(plan: Recompute, shape: StageShape, places: Sequence[int] = ()) -> dict[int, float]:
    """The nodes that a level may recompute as steps of their own: node index -> share of its forward.

    Below `medium` a backward recomputes inside itself. places: [nodes] layer of each, by default `layers_of_nodes`.
    """
    layers = {node.layer for node in shape.nodes if node.role == "dispatch"}
    places = places or layers_of_nodes(shape)
    levels = [_levels_by_role(plan, plan.of_layer(place)) for place in places]
    again = {
        index: recomputed_share(node.role, levels[index][node.role])
        for index, node in enumerate(shape.nodes)
        if node.role in levels[index] and node.layer in layers and index in shape.backward
    }
    for exchange in _into_cores(shape):
        if plan.adaptive is None and plan.of_layer(places[exchange]) >= Level.LAYER:
            again |= dict.fromkeys((exchange, *shape.consumers[exchange]), 1.0)
    return again


def _into_cores(shape: StageShape) -> list[int]:
    """The exchanges that bring rows of all tensor ranks to a core, which the same layer scatters, and those inside."""
    scattered, nodes = {node.layer for node in shape.nodes if node.role == "scatter"}, shape.nodes
    return [
        at
        for at in shape.backward
        if nodes[at].role in INSIDE_CORES or (nodes[at].role == "gather" and nodes[at].layer in scattered)
    ]


def opened_cores(shape: StageShape) -> frozenset[int]:
    """The segments of cores with exchanges inside: the takers of their gathered rows, and of what comes in inside."""
    inside = [at for at, node in enumerate(shape.nodes) if node.role in INSIDE_CORES]
    made = [before for at in inside for before in shape.nodes[at].after]
    gathers = [at for maker in made for at in shape.nodes[maker].after if shape.nodes[at].role == "gather"]
    return frozenset(taker for exchange in (*inside, *gathers) for taker in shape.consumers[exchange])


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


_INSIDE = {
    "attention": (Level.NORM, Level.LAYER),
    "experts": (Level.ACT, Level.MEDIUM),
    "dense": (Level.ACT, Level.FULL),
}
"""By role, the first level at which a backward repeats element-wise work, and the first with a larger recomputation."""


REPEATING = frozenset(_INSIDE)
"""Roles whose backwards may repeat element-wise work."""


def repeats_inside(role: str, level: Level) -> bool:
    """Whether the backward of a node repeats norms or activations inside itself at the level of its layer."""
    first, beyond = _INSIDE.get(role, (Level.LAYER, Level.LAYER))
    return first <= level < beyond


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
