"""The work that I leaves for W: per product what its weight gradients need, and where they go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from schedc_runtime.stage.additions import Leaf
from schedc_runtime.stage.engine import edge_to
from schedc_runtime.stage.frontier import Product
from schedc_runtime.stage.graph import LEAF, Node
from schedc_runtime.stage.recipes import Slots
from schedc_runtime.stage.saved_tensors import Packed, saved_tensor


class WeightWork:
    """What W needs for the gradients of one product.

    saved: the tensors that the node saved, by name. grad: [as the node's output] its gradient; None if it got none.
    chain: [slots] where the gradients go on: a parameter, or an edge to what lies before it. turned: slots whose
    gradients go on transposed. order: number of the node in the order of the forward. packed: whether a saved tensor
    lies behind a hook. unhooked: whether the node has no hooks.
    """

    __slots__ = ("chain", "facts", "grad", "left", "order", "packed", "product", "saved", "turned", "unhooked")

    def __init__(self, product: Product, nodes: Sequence[Node], unhooked_from: int) -> None:
        node = nodes[product.number]
        self.product = product
        self.grad: Tensor | None = None
        self.left: Any = None
        """What a node that leaves its own work (`Recipe.leaves`) has put here."""
        self.order = order = node._sequence_nr()
        self.facts = product.recipe.facts(node, product.slots)
        self.packed = False
        saved: dict[str | int, Any] = {}
        self.saved = saved
        for where in product.saved:
            saved[where[0]] = tensor = saved_tensor(node, where)
            if type(tensor) is Packed:
                self.packed = True
        self.chain: tuple[Leaf | GradientEdge, ...]
        if product.leaves and not _older(nodes, product.passed, unhooked_from):
            self.unhooked, self.chain, self.turned = True, product.leaves, product.turned
        else:
            self.unhooked = order >= unhooked_from
            self.chain, self.turned = _chain(product, nodes, unhooked_from)

    def arrive(self, grads: Sequence[Tensor | None]) -> None:
        """Take the gradient of the node's output. It is called before the node runs."""
        self.grad = grads[0]
        if self.packed:
            self.unpack()

    def unpack(self, in_backward: bool = True) -> None:
        """Bring back what lies behind hooks: with ``in_backward`` only what the backward recomputes anyway."""
        for name, tensor in self.saved.items():
            if isinstance(tensor, Packed) and (tensor.in_backward or not in_backward):
                self.saved[name] = tensor.value()

    @property
    def edges(self) -> list[GradientEdge]:
        """[slots] the edges behind which the gradients go on."""
        return [way.edge if isinstance(way, Leaf) else way for way in self.chain]

    def take_turn(self) -> None:
        """Let the engine add the gradients in the order of the forward, however long the ways to the parameters are."""
        self.chain = tuple(_in_turn(edge, self.order) if edge.node.name() == LEAF else edge for edge in self.edges)

    def gradients(self) -> Sequence[Tensor | None]:
        """[slots] the gradients of the product's slots, which go on at ``chain``."""
        grad, product = self.grad, self.product
        if product.recipe.leaves:
            left, self.left = self.left, None
            return () if left is None else product.recipe.product(product.slots, None, left, self.facts)
        if grad is None:
            return ()
        if self.packed:
            self.unpack(in_backward=False)
        if self.turned:
            return product.recipe.product(product.slots, grad, self.saved, self.facts, self.turned)
        return product.recipe.product(product.slots, grad, self.saved, self.facts)


def _older(nodes: Sequence[Node], numbers: Sequence[int], unhooked_from: int) -> bool:
    """Whether one of the nodes may have a hook, since it is older than ``unhooked_from``."""
    for number in numbers:  # noqa: SIM110 -- a generator costs as much as all else here
        if nodes[number]._sequence_nr() < unhooked_from:
            return True
    return False


def _chain(
    product: Product, nodes: Sequence[Node], unhooked_from: int
) -> tuple[tuple[Leaf | GradientEdge, ...], Slots]:
    """[slots] where the gradients go on, and the slots whose gradients go on transposed."""
    chain: list[Leaf | GradientEdge] = []
    turned: Slots = ()
    for slot, number, output, leaf in product.ways:
        if leaf is None or nodes[number]._sequence_nr() < unhooked_from:
            chain.append(edge_to(nodes[number], output))
        else:
            chain.append(leaf)
            if slot in product.recipe.turns:
                turned = (*turned, slot)
    return tuple(chain), turned


def _in_turn(leaf: GradientEdge, order: int) -> GradientEdge:
    """An edge that goes on to ``leaf`` through a node with a place in the order of the forward."""
    with torch.enable_grad():
        parameter: Tensor = leaf.node.variable  # type: ignore[attr-defined]
        edge = get_gradient_edge(parameter.view_as(parameter))
    edge.node._set_sequence_nr(order)  # type: ignore[attr-defined]
    return edge


class AddedLater(NamedTuple):
    """A parameter's gradient, of its shape, that I has computed and W adds."""

    leaf: Leaf
    grad: Tensor


class PendingWork(NamedTuple):
    """The work of one W: gradients that I has computed, and products, in groups that meet in a parameter."""

    later: list[AddedLater]
    products: deque[list[WeightWork]]
