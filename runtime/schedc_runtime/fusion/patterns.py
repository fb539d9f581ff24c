"""Patterns of chains, written as Python functions and traced by torch.fx, and where they are in a graph.

A parameter of a pattern takes any argument: a value of the graph or a constant. One that is used twice takes the same
argument twice. Sums and products match in either order. What lies inside of a chain is used by the chain alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import symbolic_trace

from schedc_runtime.partition.uniform_calls import COMMUTES, call_of

Bindings = dict[str, Any]
"""What the parameters of a pattern take: nodes of a graph, or constants."""


@dataclass(frozen=True)
class Match:
    """A chain in a graph. nodes: those of the chain, in the order of the graph; the last one gives its result."""

    nodes: tuple[fx.Node, ...]
    values: Bindings

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


class Pattern:
    """A chain that ends in one value, as a Python function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        graph = symbolic_trace(function).graph
        (end,) = next(node for node in graph.nodes if node.op == "output").args
        assert isinstance(end, fx.Node)
        self.end = end

    def match(self, node: fx.Node) -> Match | None:
        """The chain that ends in ``node``; None where there is none."""
        for values, inside in _value(self.end, node, {}, {}):
            order = _in_order(node, inside)
            if order is not None:
                return Match(order, values)
        return None


def _in_order(end: fx.Node, inside: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node, ...] | None:
    """The nodes of a chain in the order of the graph; None if something else uses or disturbs them."""
    chain = set(inside.values())
    if any(user not in chain for node in chain if node is not end for user in node.users):
        return None
    ordered: list[fx.Node] = []
    node = end
    while len(ordered) < len(chain):
        if node in chain:
            ordered.append(node)
        if node.meta.get("mutates"):
            return None  # what is read before a write must not be read behind it
        node = node.prev
    if len({node.meta.get("ambient") for node in chain}) > 1:
        return None
    return tuple(reversed(ordered))


Found = Iterator[tuple[Bindings, dict[fx.Node, fx.Node]]]


def _value(wanted: Any, actual: Any, values: Bindings, inside: dict[fx.Node, fx.Node]) -> Found:
    """All ways to match an argument. inside: [nodes of the pattern so far] nodes of the graph."""
    if isinstance(wanted, fx.Node):
        if wanted.op == "placeholder":
            name = str(wanted.target)
            if name not in values:
                yield {**values, name: actual}, inside
            elif _same(values[name], actual):
                yield values, inside
        elif wanted in inside:
            if inside[wanted] is actual:
                yield values, inside
        elif isinstance(actual, fx.Node):
            yield from _call(wanted, actual, values, inside)
    elif isinstance(wanted, (tuple, list)):
        if isinstance(actual, (tuple, list)) and len(actual) == len(wanted):
            yield from _all(wanted, actual, values, inside)
    elif _same(wanted, actual):
        yield values, inside


def _call(wanted: fx.Node, actual: fx.Node, values: Bindings, inside: dict[fx.Node, fx.Node]) -> Found:
    one, other = call_of(wanted), call_of(actual)
    if one is None or other is None or one.name != other.name:
        return
    here = {**inside, wanted: actual}
    yield from _all(one.args, other.args, values, here)
    if one.name in COMMUTES:
        first, second, *rest = other.args
        yield from _all(one.args, (second, first, *rest), values, here)


def _all(wanted: Sequence[Any], actual: Sequence[Any], values: Bindings, inside: dict[fx.Node, fx.Node]) -> Found:
    if not wanted:
        yield values, inside
        return
    for one, here in _value(wanted[0], actual[0], values, inside):
        yield from _all(wanted[1:], actual[1:], one, here)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, fx.Node) or isinstance(other, fx.Node):
        return one is other
    return type(one) is type(other) and bool(one == other)
