"""I and W of one stage: a backward that stops at the frontier, and the weight gradients that it leaves behind.

    I   one call of the engine: gradients of inputs, and of parameters that no product uses. At each product of the
        frontier it leaves the gradient of the output and what the product has saved. The graph is freed.
    W   per parameter: the product by its formula, then the chain by the engine, which fires the parameter's own hooks.

No forward is replaced, and B is autograd's own backward: I + W give its bits. A gradient that I computes is added to
its parameter in W, so that all gradients are summed in the order of W. Gradients of matrices are added in I: held until
W, such a gradient would be as large as its parameter.

Zero Bubble Pipeline Parallelism (Qi et al., 2023), section 2, for the split of backward into I and W.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from schedc_runtime.stage.engine import differentiate, gradients_at
from schedc_runtime.stage.frontier import Frontier, Product, frontier
from schedc_runtime.stage.graph import LEAF, Node, recognized, walk
from schedc_runtime.stage.saved_tensors import Packed, recomputed_once, saved_tensor

BATCH_BYTES = 4 << 20
"""Weight gradients that one call of the engine adds: enough that small layers share its cost, and little to hold."""

_REENTRANT = "CheckpointFunctionBackward"


class WeightWork:
    """What W needs for the gradients of one product.

    saved: the tensors that the node saved, by name. grad: [as the node's output] its gradient; None if it got none.
    chain: where the gradients go on. order: number of the node in the order of the forward. packed: whether a saved
    tensor lies behind a hook.
    """

    __slots__ = ("chain", "facts", "grad", "order", "packed", "product", "saved")

    def __init__(self, product: Product, nodes: Sequence[Node]) -> None:
        node = nodes[product.number]
        self.product, self.order = product, node._sequence_nr()
        self.facts = product.recipe.facts(node, product.slots)
        self.saved: dict[str | int, Any] = {name: saved_tensor(node, name) for name in product.saved}
        self.packed = any(isinstance(tensor, Packed) for tensor in self.saved.values())
        self.chain = [GradientEdge(nodes[number], output) for number, output in product.chain]
        self.grad: Tensor | None = None

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

    def add(self) -> bool:
        """Add the gradient in the recipe's own way, if it has one and the parameter takes it; whether it did."""
        add = self.product.recipe.add
        leaf: Node = self.chain[0].node
        if add is None or self.grad is None or leaf.name() != LEAF:
            return False
        parameter: Tensor = leaf.variable
        if parameter.grad is None or has_hooks(parameter):
            return False
        add(parameter, self.grad, self.facts)
        return True

    def gradients(self) -> Sequence[Tensor | None]:
        """[slots] the gradients of the product's slots, which go on at ``chain``."""
        if self.grad is None:
            return ()
        if self.packed:
            self.unpack(in_backward=False)
        product = self.product
        return product.recipe.product(product.slots, self.grad, self.saved, self.facts)


class AddedLater(NamedTuple):
    """A parameter's gradient, of its shape, that I has computed and W adds. leaf: the parameter's node."""

    leaf: GradientEdge
    parameter: Tensor
    grad: Tensor


class PendingWork(NamedTuple):
    """The work of one W: gradients that I has computed, and products, in groups that meet in a parameter."""

    later: list[AddedLater]
    products: deque[list[WeightWork]]


class SplitBackward:
    """The split backwards of one stage, and the work that its Ws have yet to do."""

    def __init__(self) -> None:
        self.pending: dict[int, PendingWork] = {}
        """By the key of a backward, such as its microbatch."""
        self._frontiers: dict[int, Frontier] = {}
        """Where each graph was split last, by number."""
        self._warned = False

    def backward(
        self,
        key: int,
        edges: Sequence[GradientEdge],
        grads: Sequence[Tensor],
        *,
        graph: int = 0,
        late: Callable[[nn.Parameter], bool] | None = None,
    ) -> None:
        """I: the gradients of the graph's inputs, into their ``grad``; `weight` with the same key does the rest.

        grads: one per edge, of the shape of the edge's tensor. graph: number of the graph, where a stage has several.
        late: whether W adds the gradient of a parameter that I has computed; by default `is_late`.
        """
        work = self.pending[key] = PendingWork([], deque())
        if not edges:
            return
        where, nodes = self._frontier(graph, list(dict.fromkeys([edge.node for edge in edges])))
        if where is None:
            differentiate(edges, grads)
            return
        groups = [[WeightWork(product, nodes) for product in group] for group in where.together]
        with recomputed_once():
            computed = _run_to_frontier(where, nodes, list(chain.from_iterable(groups)), edges, grads)
        now: list[AddedLater] = []
        for number, grad in zip(where.in_i, computed, strict=True):
            if grad is not None:
                leaf = nodes[number]
                added_late = (late or is_late)(leaf.variable)
                (work.later if added_late else now).append(AddedLater(GradientEdge(leaf, 0), leaf.variable, grad))
        _add(now)
        work.products.extend(groups)

    def weight(self, key: int) -> None:
        """W: compute the gradients that I put off, add them to their parameters, and free each when it is done."""
        later, products = self.pending.pop(key)
        with torch.no_grad():
            _add(later)
            edges: list[GradientEdge] = []
            grads: list[Tensor] = []
            size = 0
            while products:
                group = products.popleft()
                if len(group) > 1:
                    group.sort(key=lambda work: -work.order)
                elif group[0].add():
                    group = []
                for work in group:
                    for edge, grad in zip(work.chain, work.gradients(), strict=False):
                        if grad is not None:
                            edges.append(edge)
                            grads.append(grad)
                            size += grad.numel() * grad.element_size()  # as if dense
                if edges and (size >= BATCH_BYTES or not products):
                    differentiate(edges, grads)
                    edges, grads, size = [], [], 0

    def _frontier(self, graph: int, roots: Sequence[Node]) -> tuple[Frontier | None, Sequence[Node]]:
        """Where the backward is split, and the nodes by number; no frontier for a graph that cannot be split."""
        where = self._frontiers.get(graph)
        if where is not None and (nodes := recognized(where.form, roots)) is not None:
            return where, nodes
        form, nodes = walk(roots)
        if any(node.name() == _REENTRANT for node in nodes):
            self._warn()
            return None, ()
        where = self._frontiers[graph] = frontier(form, nodes)
        return where, nodes

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "a stage has reentrant checkpoints, which cannot run a part of a backward: all its weight gradients are"
                " computed in I, and nothing is left for W; pass use_reentrant=False to torch.utils.checkpoint",
                stacklevel=2,
            )


def is_late(parameter: nn.Parameter) -> bool:
    """Whether W adds a gradient that I has computed: that of a vector, or of a parameter whose hook waits for it."""
    return parameter.dim() <= 1 or has_hooks(parameter)


def has_hooks(parameter: Tensor) -> bool:
    """Whether a parameter, of any shape, has hooks: of its gradient, or behind the addition."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _run_to_frontier(
    where: Frontier,
    nodes: Sequence[Node],
    works: Sequence[WeightWork],
    edges: Sequence[GradientEdge],
    grads: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """I: gives the inputs and the work items their gradients; returns those of the parameters ``where.in_i``."""
    ends = []
    for work in works:
        node = nodes[work.product.number]
        if work.product.ends:
            ends.append(work)
            continue
        # The engine would hand out the gradient as it is before the hooks of the output have seen it.
        node.register_prehook(work.arrive)
        if work.product.in_python:
            node.gradient_waits = True
    numbers = (*where.inputs, *where.in_i, *(work.product.number for work in ends))
    if not numbers:
        return ()
    arrived = gradients_at([GradientEdge(nodes[number], 0) for number in numbers], edges, grads)
    for number, grad in zip(where.inputs, arrived, strict=False):
        if grad is not None:
            _give(nodes[number].variable, grad)
    inputs, computed = len(where.inputs), len(where.inputs) + len(where.in_i)
    for work, grad in zip(ends, arrived[computed:], strict=True):
        work.arrive((grad,))
    return arrived[inputs:computed]


def _give(leaf: Tensor, grad: Tensor) -> None:
    """Add to the gradient of an input, with the strides of the input, as autograd does."""
    if grad.stride() != leaf.stride():
        grad = torch.empty_like(leaf).copy_(grad)
    leaf.grad = grad if leaf.grad is None else leaf.grad + grad


def _add(later: Sequence[AddedLater]) -> None:
    """Add gradients to their parameters. Their tensors' hooks have run, in I; those behind the addition run now."""
    if not later:
        return
    with _without_hooks(item.parameter for item in later):
        differentiate([item.leaf for item in later], [item.grad for item in later])


@contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Empties the tensors' hooks for a while."""
    aside = [(hooks, dict(hooks)) for parameter in parameters if (hooks := parameter._backward_hooks)]
    for hooks, _ in aside:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in aside:
            hooks.update(before)
