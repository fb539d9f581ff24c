"""The work that I leaves for W: per product what its weight gradients need, and where they go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from schedc_runtime.stage.frontier import Product
from schedc_runtime.stage.graph import LEAF, Node
from schedc_runtime.stage.hooks import has_hooks
from schedc_runtime.stage.recipes import Slots
from schedc_runtime.stage.saved_tensors import Packed, saved_tensor


class WeightWork:
    """What W needs for the gradients of one product.

    saved: the tensors that the node saved, by name. grad: [as the node's output] its gradient; None if it got none.
    chain: where the gradients go on. turned: slots whose gradients go on transposed. order: number of the node in the
    order of the forward. packed: whether a saved tensor lies behind a hook. unhooked: whether the node has no hooks.
    """

    __slots__ = ("chain", "facts", "grad", "left", "order", "packed", "product", "saved", "turned", "unhooked")

    def __init__(self, product: Product, nodes: Sequence[Node], unhooked_from: int) -> None:
        node = nodes[product.number]
        self.product, self.order = product, node._sequence_nr()
        self.unhooked = self.order >= unhooked_from
        self.facts = product.recipe.facts(node, product.slots)
        self.packed = False
        self.saved: dict[str | int, Any] = {}
        for name in product.saved:
            self.saved[name] = tensor = saved_tensor(node, name)
            if type(tensor) is Packed:
                self.packed = True
        self.chain, self.turned = _way(product, nodes, unhooked_from)
        self.grad: Tensor | None = None
        self.left: Any = None
        """What a node that leaves its own work (`Recipe.leaves`) has put here."""

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

    def take_turn(self) -> None:
        """Let the engine add the gradients in the order of the forward, however long the ways to the parameters are."""
        self.chain = [_in_turn(edge, self.order) if edge.node.name() == LEAF else edge for edge in self.chain]

    def add(self) -> bool:
        """Add the gradient in the recipe's own way, if it has one and the parameter takes it; whether it did."""
        add = self.product.recipe.add
        if add is None or self.grad is None or self.chain[0].node.name() != LEAF:
            return False
        parameter: Tensor = self.chain[0].node.variable  # type: ignore[attr-defined]
        if parameter.grad is None or has_hooks(parameter):
            return False
        add(parameter, self.grad, self.facts)
        return True

    def gradients(self) -> Sequence[Tensor | None]:
        """[slots] the gradients of the product's slots, which go on at ``chain``."""
        if self.product.recipe.leaves:
            left, self.left = self.left, None
            return () if left is None else self.product.recipe.product(self.product.slots, None, left, self.facts)
        if self.grad is None:
            return ()
        if self.packed:
            self.unpack(in_backward=False)
        product = self.product
        if self.turned:
            return product.recipe.product(product.slots, self.grad, self.saved, self.facts, self.turned)
        return product.recipe.product(product.slots, self.grad, self.saved, self.facts)


def _way(product: Product, nodes: Sequence[Node], unhooked_from: int) -> tuple[Sequence[GradientEdge], Slots]:
    """[slots] where the gradients go on, and the slots whose gradients go on transposed.

    A transpose in front of a parameter is left out where it has no hook. A first gradient takes the whole chain: the
    engine then keeps it as it is, and does not copy it.
    """
    edges, turned = [], []
    for slot, (number, output), leaf in zip(product.slots, product.chain, product.leaves, strict=True):
        node = nodes[number]
        if leaf is None or node._sequence_nr() < unhooked_from or leaf.node.variable.grad is None:  # type: ignore[attr-defined]
            edges.append(GradientEdge(node, output))
        else:
            edges.append(leaf)
            turned.append(slot)
    return edges, tuple(turned)


def _in_turn(leaf: GradientEdge, order: int) -> GradientEdge:
    """An edge that goes on to ``leaf`` through a node with a place in the order of the forward."""
    with torch.enable_grad():
        parameter: Tensor = leaf.node.variable  # type: ignore[attr-defined]
        edge = get_gradient_edge(parameter.view_as(parameter))
    edge.node._set_sequence_nr(order)  # type: ignore[attr-defined]
    return edge


class AddedLater(NamedTuple):
    """A parameter's gradient, of its shape, that I has computed and W adds. leaf: the parameter's node."""

    leaf: GradientEdge
    parameter: Tensor
    grad: Tensor


class PendingWork(NamedTuple):
    """The work of one W: gradients that I has computed, and products, in groups that meet in a parameter."""

    later: list[AddedLater]
    products: deque[list[WeightWork]]
