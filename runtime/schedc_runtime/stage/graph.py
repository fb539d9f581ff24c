"""Walks autograd's graph of one microbatch, and recognizes the same graph at the next microbatch.

A graph is numbered from its roots on, in the order in which a breadth-first walk meets its nodes. The numbers are the
same for every microbatch whose graph has the same form. `recognized` proves that it has: every edge is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
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

    @cached_property
    def first_edges(self) -> tuple[tuple[int, ...], ...]:
        """[nodes] the inputs of each node that lead to nodes which the walk has not met."""
        count, rows = self.roots, []
        for row in self.edges:
            first = []
            for slot, (child, _) in enumerate(row):
                if child == count:
                    first.append(slot)
                    count += 1
            rows.append(tuple(first))
        return tuple(rows)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """[nodes] number of inputs of each node."""
        return tuple(map(len, self.edges))

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """[edges] which output of a node each edge leads to, node by node."""
        return tuple(output for row in self.edges for _, output in row)

    @cached_property
    def children(self) -> Callable[[Sequence[Node | None]], tuple[Node | None, ...]]:
        """Picks from the nodes by number, with None behind the last: [edges] what each edge leads to."""
        return itemgetter(*(child for row in self.edges for child, _ in row), -1, -1)


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
    rows = []
    try:
        for node, first in zip(nodes, graph.first_edges, strict=False):  # nodes grows
            row = node.next_functions
            rows.append(row)
            for slot in first:
                nodes.append(row[slot][0])
    except (AttributeError, IndexError):  # no node behind the edge, or no edge
        return None
    if tuple(map(type, nodes)) != graph.kinds or len(set(nodes)) != len(nodes) or tuple(map(len, rows)) != graph.widths:
        return None
    edges = list(chain.from_iterable(rows))
    if tuple([output for _, output in edges]) != graph.outputs:
        return None
    if (*[child for child, _ in edges], None, None) != graph.children([*nodes, None]):
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
