"""Adds gradients to parameters: together where no hook waits for them, else by autograd's engine, which fires hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedc_runtime.kernels.sums import add_gradients
from schedc_runtime.stage.engine import differentiate, edge_to
from schedc_runtime.stage.graph import Node
from schedc_runtime.stage.hooks import hooks_of

BATCH_BYTES = 4 << 20
"""Gradients that are added at once: enough that small layers share the cost, and little to hold."""


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """A parameter and its node of autograd's graph. before, behind: the hooks of the node, as torch keeps them."""

    edge: GradientEdge
    parameter: Any
    before: Mapping[int, Any]
    behind: Mapping[int, Any]


def leaf_of(node: Node) -> Leaf:
    """The leaf with this node."""
    return Leaf(edge_to(node), node.variable, *hooks_of(node))


class Additions:
    """Gradients that `finish` adds together.

    The engine adds in place, too, where a gradient is there: both ways give the same bits.
    """

    __slots__ = ("_edges", "_grads", "_summands", "_totals", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of the gradients, as if dense."""
        self._totals: list[Tensor] = []
        self._summands: list[Tensor] = []
        self._edges: list[GradientEdge] = []
        self._grads: list[Tensor] = []

    def add(self, leaf: Leaf, grad: Tensor, *, own: bool = False) -> None:
        """Add ``grad`` to the gradient of a parameter of its shape. A parameter comes at most once.

        own: whether nobody else holds ``grad``, so that it may become the parameter's first gradient.
        """
        parameter = leaf.parameter
        if type(grad) is not Tensor or (
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks or leaf.before or leaf.behind
        ):
            self.run(leaf.edge, grad)
            return
        total = parameter.grad
        if type(total) is Tensor and total.dtype is grad.dtype and total.layout is torch.strided is grad.layout:
            self._totals.append(total)
            self._summands.append(grad)
            self.bytes += grad.nbytes
        elif total is None and own and _as_engine_keeps_it(grad, parameter):
            parameter.grad = grad
        else:
            self.run(leaf.edge, grad)

    def run(self, edge: GradientEdge, grad: Tensor) -> None:
        """Let the engine run the graph from ``edge`` on. grad: of the shape of the tensor of ``edge``."""
        self._edges.append(edge)
        self._grads.append(grad)
        self.bytes += grad.numel() * grad.element_size()

    def finish(self) -> None:
        """Add what is to be added. It is called without autograd."""
        if self._totals:
            add_gradients(self._totals, self._summands)
        if self._edges:
            differentiate(self._edges, self._grads)


def _as_engine_keeps_it(grad: Tensor, parameter: Tensor) -> bool:
    """Whether autograd's engine would take ``grad`` as a first gradient as it is, without a copy."""
    return (
        grad.dtype is parameter.dtype is getattr(parameter, "grad_dtype", grad.dtype)
        and grad.layout is torch.strided is parameter.layout
        and grad.stride() == parameter.stride()
    )
