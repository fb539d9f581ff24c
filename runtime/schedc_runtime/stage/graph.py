"""Walks autograd's graph of one microbatch, and recognizes the same graph at the next microbatch.

A graph is numbered from its roots on, in the order in which a breadth-first walk meets its nodes. The numbers are the
same for every microbatch whose graph has the same form. `recognized` proves that it has: every edge is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Node = Any
"""A node of autograd's graph."""

LEAF = "torch::autograd::AccumulateGrad"
"""The node that adds to a leaf's gradient."""

Edge = tuple[int, int]
"""(number of the node behind the edge, or -1 for none; which output of that node it leads to)."""


@dataclass(frozen=True, eq=False)
class GraphForm:
    """The form of a graph.

    roots: number of roots. kinds: [nodes] class of each node. edges: [nodes] what each input of a node leads to.
    parameters: the node of each parameter, by number. inputs: numbers of the other leaves.
    """

    roots: int
    kinds: tuple[Any, ...]
    edges: tuple[tuple[Edge, ...], ...]
    parameters: dict[int, Node]
    inputs: tuple[int, ...]


def walk(roots: Sequence[Node]) -> tuple[GraphForm, list[Node]]:
    """The form of the graph behind ``roots``, which are distinct, and its nodes by number."""
    nodes: list[Any] = list(roots)
    number = {node: index for index, node in enumerate(nodes)}
    edges: list[tuple[Edge, ...]] = []
    for node in nodes:  # which grows
        row: list[Edge] = []
        for child, output in node.next_functions:
            if child is None:
                row.append((-1, 0))
                continue
            if child not in number:
                number[child] = len(nodes)
                nodes.append(child)
            row.append((number[child], output))
        edges.append(tuple(row))
    leaves = [index for index, node in enumerate(nodes) if node.name() == LEAF]
    parameters = {index: nodes[index] for index in leaves if is_parameter(nodes[index])}
    inputs = tuple(index for index in leaves if index not in parameters)
    return GraphForm(len(roots), tuple(map(type, nodes)), tuple(edges), parameters, inputs), nodes


def recognized(graph: GraphForm, roots: Sequence[Node]) -> list[Node] | None:
    """The nodes behind ``roots`` by number if they form ``graph`` over the same parameters; None if they do not."""
    if len(roots) != graph.roots:
        return None
    nodes: list[Any] = list(roots)
    count = len(nodes)
    for node, kind, row in zip(nodes, graph.kinds, graph.edges, strict=False):  # nodes grows
        if type(node) is not kind:
            return None
        children = node.next_functions
        if len(children) != len(row):
            return None
        for (child, output), (index, expected) in zip(children, row, strict=True):
            if output != expected:
                return None
            if index == count:
                nodes.append(child)
                count += 1
            elif (nodes[index] if index >= 0 else None) is not child:
                return None
    if count != len(graph.kinds) or len(set(nodes)) != count:
        return None
    for index, leaf in graph.parameters.items():
        if nodes[index] is not leaf:
            return None
    for index in graph.inputs:
        if is_parameter(nodes[index]):
            return None
    return nodes


def is_parameter(leaf: Node) -> bool:
    """Whether a leaf's node belongs to a parameter, and not to an input of the stage."""
    variable: Tensor = leaf.variable
    return isinstance(variable, nn.Parameter)
