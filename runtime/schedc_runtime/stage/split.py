"""I and W of one stage: a backward that stops at the frontier, and the weight gradients that it leaves behind.

    I   one call of the engine: gradients of inputs, and of parameters that no product uses. At each product of the
        frontier it leaves the gradient of the output and what the product has saved. The graph is freed.
    W   per parameter: the product by its formula, then the chain by the engine, which fires the parameter's own hooks.

No forward is replaced, and B is autograd's own backward: I + W give its bits. A gradient that I computes is added in I,
so that nothing holds it. Where Ws come in another order than Is, W adds the gradients of vectors (`is_late`). Then they
are summed in the order of W, as those of products are.

Zero Bubble Pipeline Parallelism (Qi et al., 2023), section 2, for the split of backward into I and W.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain, repeat

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from schedc_runtime.stage.additions import BATCH_BYTES, Additions, Leaf
from schedc_runtime.stage.engine import differentiate, edge_to, gradients_at
from schedc_runtime.stage.frontier import Frontier, frontier
from schedc_runtime.stage.graph import LEAF, Node, is_parameter, walk
from schedc_runtime.stage.hooks import HookMark, before_node, has_hooks, unhooked_from, without_hooks
from schedc_runtime.stage.recipes import COMPILED, CUT, compiled_backward
from schedc_runtime.stage.saved_tensors import recomputed_once
from schedc_runtime.stage.weight_work import AddedLater, PendingWork, WeightWork

_REENTRANT = "CheckpointFunctionBackward"
_CHECKPOINTED = (
    "a stage has reentrant checkpoints, which cannot run a part of a backward: all its weight gradients are computed in"
    " I, and nothing is left for W; pass use_reentrant=False to torch.utils.checkpoint"
)
_WHOLE = (
    "a stage has blocks that torch.compile has compiled before: their weight gradients are computed in I, and nothing"
    " of them is left for W; give the pipeline the blocks uncompiled and pass compile=True, which cuts their backwards"
)


class SplitBackward:
    """The split backwards of one stage, and the work that its Ws have yet to do."""

    def __init__(self) -> None:
        self.pending: dict[int, PendingWork] = {}
        """By the key of a backward, such as its microbatch."""
        self._frontiers: dict[int, Frontier] = {}
        """Where each graph was split last, by number."""
        self._warned: set[str] = set()

    def backward(
        self,
        key: int,
        edges: Sequence[GradientEdge],
        grads: Sequence[Tensor],
        *,
        graph: int = 0,
        late: Callable[[nn.Parameter], bool] = has_hooks,
        began: HookMark | None = None,
    ) -> None:
        """I: the gradients of the graph's inputs, into their ``grad``; `weight` with the same key does the rest.

        grads: one per edge, of the shape of the edge's tensor. graph: number of the graph, where a stage has several.
        late: whether W adds the gradient of a parameter that I has computed; by default, if it has hooks.
        began: when the forward began. Without it each product is expected to have hooks, which costs more.
        """
        work = self.pending[key] = PendingWork([], deque())
        if not edges:
            return
        where, nodes = self._frontier(graph, list(dict.fromkeys([edge.node for edge in edges])))
        if where is None:
            differentiate(edges, grads)
            return
        first = unhooked_from(began)
        groups = [list(map(WeightWork, group, repeat(nodes), repeat(first))) for group in where.together]
        works = list(chain.from_iterable(groups))
        # Inside of it each node that the engine runs costs as much again: the engine copies what it refers to.
        with recomputed_once() if [work for work in works if work.packed] else nullcontext():
            computed = _run_to_frontier(where, nodes, works, edges, grads)
        sums = Additions()
        for leaf, grad in zip(where.leaves, computed, strict=False):
            if grad is None:
                continue
            if late(leaf.parameter):
                work.later.append(AddedLater(leaf, grad))
            else:
                sums.add(leaf, grad)
        with torch.no_grad():
            sums.finish()
        work.products.extend(groups)

    def weight(self, key: int) -> None:
        """W: compute the gradients that I put off, add them to their parameters, and free each when it is done."""
        later, products = self.pending.pop(key)
        with torch.no_grad():
            sums = _additions(later)
            while products:
                group = products.popleft()
                if len(group) > 1:
                    group.sort(key=lambda work: -work.order)
                    if _arrive_in_another_order(group):
                        for work in group:
                            work.take_turn()
                for work in group:
                    for way, grad in zip(work.chain, work.gradients(), strict=False):
                        if grad is None:
                            continue
                        if type(way) is Leaf:
                            if grad.shape != way.parameter.shape:  # of a bias, as autograd's engine sums its rows
                                grad = grad.sum_to_size(way.parameter.shape)
                            sums.add(way, grad, own=grad is not work.grad)
                        else:
                            sums.run(way, grad)  # type: ignore[arg-type]
                if sums.bytes >= BATCH_BYTES:
                    sums.finish()
                    sums = Additions()
            sums.finish()

    def _frontier(self, graph: int, roots: Sequence[Node]) -> tuple[Frontier | None, Sequence[Node]]:
        """Where the backward is split, and the nodes by number; no frontier for a graph that cannot be split."""
        where = self._frontiers.get(graph)
        if where is not None and (nodes := where.recognition.nodes(roots)) is not None:
            return where, nodes
        form, nodes = walk(roots)
        if any(node.name() == _REENTRANT for node in nodes):
            self._warn(_CHECKPOINTED)
            return None, ()
        where = self._frontiers[graph] = frontier(form, nodes)
        if any(_is_whole(node) for node in nodes):
            self._warn(_WHOLE)
        return where, nodes

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)


def is_late(parameter: nn.Parameter) -> bool:
    """Whether W adds a gradient that I has computed, where Ws may come in another order than Is.

    It adds that of a vector, and of a parameter whose hook waits for it. Held until W, the gradient of a matrix would
    be as large as its parameter.
    """
    return parameter.dim() <= 1 or has_hooks(parameter)


def _arrive_in_another_order(group: Sequence[WeightWork]) -> bool:
    """Whether the engine would add the gradients of a parameter in another order than that of the forward.

    It takes those that need no way to the parameter first. The sum of two is the same in either order.
    """
    if any(work.product.recipe.leaves for work in group):
        return True
    return len(group) > 2 and len({edge.node.name() == LEAF for work in group for edge in work.edges}) > 1


def _is_whole(node: Node) -> bool:
    """Whether a compiled block's backward, which computes gradients of matrices, is not cut."""
    if node.name() != COMPILED or hasattr(compiled_backward(node), CUT):
        return False
    leaves = [child for child, _ in node.next_functions if child is not None and child.name() == LEAF]
    return any(is_parameter(leaf) and leaf.variable.dim() > 1 for leaf in leaves)


def _run_to_frontier(
    where: Frontier,
    nodes: Sequence[Node],
    works: Sequence[WeightWork],
    edges: Sequence[GradientEdge],
    grads: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """I: gives the inputs and the work items their gradients; returns those of the parameters ``where.in_i``."""
    captured: list[WeightWork] = []
    woken: list[GradientEdge] = []
    for work in works:
        product = work.product
        if product.recipe.leaves:
            nodes[product.number].gradient_waits = work
            if product.ends:  # I runs it because a parameter behind it is asked for, which gets nothing
                woken.append(work.edges[0])
            continue
        if product.ends or (work.unhooked and not work.packed):
            captured.append(work)
        else:
            # The engine would hand out the gradient as it is before the hooks of the output have seen it.
            before_node(nodes[product.number], work.arrive)
        if product.in_python and not product.ends:
            nodes[product.number].gradient_waits = True
    leaves = [edge_to(nodes[number]) for number in where.inputs]
    wanted = [
        *leaves,
        *[leaf.edge for leaf in where.leaves],
        *[edge_to(nodes[work.product.number]) for work in captured],
    ]
    if not wanted and not woken:
        return ()
    with without_hooks(edge.node.variable for edge in woken):  # type: ignore[attr-defined]
        arrived = gradients_at([*wanted, *dict.fromkeys(woken)], edges, grads)
    for number, grad in zip(where.inputs, arrived, strict=False):
        if grad is not None:
            _give(nodes[number].variable, grad)
    inputs, computed = len(leaves), len(leaves) + len(where.leaves)
    for work, grad in zip(captured, arrived[computed:], strict=False):
        # A view would hold more than its elements: facts for autograd, and the tensor that it is a view of.
        work.grad = grad.detach() if grad is not None and grad._is_view() else grad
        if work.packed:
            work.unpack()
    return arrived[inputs:computed]


def _give(leaf: Tensor, grad: Tensor) -> None:
    """Add to the gradient of an input, with the strides of the input, as autograd does."""
    if grad.stride() != leaf.stride():
        grad = torch.empty_like(leaf).copy_(grad)
    leaf.grad = grad if leaf.grad is None else leaf.grad + grad


def _additions(computed: Sequence[AddedLater]) -> Additions:
    """Additions that begin with gradients from I. Their tensors' hooks have run: those with hooks are added now."""
    sums = Additions()
    hooked = []
    for item in computed:
        if item.leaf.parameter._backward_hooks:
            hooked.append(item)
        else:
            sums.add(item.leaf, item.grad)
    if hooked:
        with without_hooks(item.leaf.parameter for item in hooked):
            differentiate([item.leaf.edge for item in hooked], [item.grad for item in hooked])
    return sums
