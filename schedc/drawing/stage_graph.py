"""A stage as a graph of its segments and exchanges, with the longest chain of its forward marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphviz import Digraph

from schedc.cell.costs import CellCosts
from schedc.cell.graph import Lane, Node, StageShape
from schedc.cell.program import Half
from schedc.drawing.graph import CRITICAL, graph_text, lines, new_graph, refuse_large
from schedc.drawing.markup import quantity
from schedc.drawing.palette import LIGHT

_FILLS = dict(zip((Lane.NODE, Lane.COMPUTE, Lane.RAIL, Lane.HOST), LIGHT.phases, strict=False))
_EXCHANGE = {"shape": "hexagon", "style": "filled", "margin": "0,0"}
_BARE = {"shape": "plain", "style": "", "class": "bare", "fontcolor": LIGHT.text}


def draw_stage_graph(title: str, shape: StageShape, costs: CellCosts) -> Digraph:
    """Boxes for segments, hexagons for exchanges, and an edge from each node to the nodes that take its output.

    Times and the longest chain are shown where the costs give the stage times. Raises `DiagnosticError` (S608) for a
    stage of more than `MOST_NODES` nodes.
    """
    refuse_large(len(shape), "choose a stage of fewer blocks with --cell-stages, or fewer blocks in the cost file")
    chain, length = longest_chain(shape, costs)
    legend = "boxes: segments; hexagons: exchanges, by their lane"
    marked = [f"marked: the longest chain of the forward, {quantity(length)}"] if length else []
    graph = new_graph("stage", [title, "; ".join([legend, *marked])])
    graph.node("input", graph_text("input"), **_BARE)
    graph.node("output", graph_text("output"), **_BARE)
    for number, node in enumerate(shape.nodes):
        kind = _EXCHANGE if node.exchange else {}
        mark = CRITICAL if number in chain else {}
        graph.node(
            f"n{number}", lines([*_label(shape, number, costs)], "n"), fillcolor=_FILLS[node.lane], **kind, **mark
        )
        if node.inputs:
            graph.edge("input", f"n{number}")
    for before, after in _edges(shape):
        on_chain = before in chain and after in chain and chain.index(after) == chain.index(before) + 1
        graph.edge(f"n{before}", f"n{after}", **(CRITICAL if on_chain else {}))
    for number in shape.outputs:
        graph.edge(f"n{number}", "output")
    return graph


def longest_chain(shape: StageShape, costs: CellCosts) -> tuple[list[int], float]:
    """The nodes of the chain that bounds the forward from below, in order, and its time in time units.

    Returns ([], 0) without times.
    """
    ends: list[float] = []
    for number, node in enumerate(shape.nodes):
        begin = max((ends[before] for before in node.after), default=0.0)
        ends.append(begin + costs.duration(shape, Half.FORWARD, number))
    if not any(ends):
        return [], 0.0
    chain = [max(range(len(ends)), key=lambda number: (ends[number], number))]
    while after := shape.nodes[chain[-1]].after:
        chain.append(max(after, key=ends.__getitem__))
    return chain[::-1], max(ends)


def _edges(shape: StageShape) -> Iterator[tuple[int, int]]:
    for number, node in enumerate(shape.nodes):
        yield from ((before, number) for before in node.after)


def _label(shape: StageShape, number: int, costs: CellCosts) -> Iterator[str]:
    """The lines of a node's label: name, times, and facts."""
    node, times = shape.nodes[number], costs.times(shape, number)
    yield node.name
    passes = ("forward", "backward") if node.exchange else ("F", "I", "W")
    named = zip(passes if node.differentiable else passes[:1], times, strict=False)
    if any(times):
        yield ", ".join(f"{name} {quantity(time)}" for name, time in named if time)
    yield from _facts(node)


def _facts(node: Node) -> Sequence[str]:
    facts = []
    if node.weights:
        facts.append("weights")
    if not node.differentiable:
        facts.append("no gradient")
    if node.recomputed:
        facts.append("recomputed" if node.share == 1 else f"recomputed: {100 * node.share:.0f} %")
    if node.inside:
        facts.append(f"backward recomputes {100 * node.inside:.0f} %")
    return facts
