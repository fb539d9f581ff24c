"""Slices: the graph of a stage in which a microbatch runs as several slices of its rows.

    whole     attention -> [dispatch] -> experts -> [combine] -> post
    sliced    attention.s0 -> [dispatch.s0] -> experts.s0 -> ...
              attention.s1 -> [dispatch.s1] -> experts.s1 -> ...

Every node appears once per slice, behind the nodes of its own slice. So the exchange of a slice can hide behind the
compute of another, in cells of one op too. What needs all rows of the microbatch is a joint node, which runs once.

Slices may be of the tokens of a sequence, where tensor ranks gather and scatter rows. Attentions are then joint nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from schedc.cell.graph import Node, StageShape, slice_suffix

JOINT = frozenset({"balance"})
"""Roles of joint nodes. The auxiliary loss of a microbatch counts the tokens of all of its slices."""


@lru_cache(maxsize=1024)
def sliced(shape: StageShape, count: int) -> StageShape:
    """The graph in which every node that is not joint appears ``count`` times, once for each slice.

    The nodes of the slices follow each other in ascending order, where the node of the whole microbatch stood.
    """
    return in_slices_but(shape, count, [index for index, node in enumerate(shape.nodes) if node.role in JOINT])


def in_slices_but(shape: StageShape, count: int, joint: Collection[int]) -> StageShape:
    """The graph in which every node appears ``count`` times, but those with the indexes ``joint``."""
    if count == 1:
        return shape
    nodes: list[Node] = []
    places: list[tuple[int, ...]] = []
    for index, node in enumerate(shape.nodes):
        first = len(nodes)
        if index in joint:
            nodes.append(replace(node, after=_sorted(places[before] for before in node.after)))
        else:
            nodes += [_of_slice(node, number, count, places, first) for number in range(count)]
        places.append(tuple(range(first, len(nodes))))
    return StageShape(tuple(nodes), _sorted(places[output] for output in shape.outputs))


def _of_slice(node: Node, number: int, count: int, places: list[tuple[int, ...]], first: int) -> Node:
    after = _sorted(places[before][number : number + 1] or places[before] for before in node.after)
    name = f"{node.name}.{slice_suffix(number)}"
    behind = first + number - 1 if number else -1
    return replace(node, name=name, after=after, slice=number, slices=count, behind=behind)


def _sorted(places: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({place for row in places for place in row}))
