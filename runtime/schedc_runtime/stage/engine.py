"""Calls autograd's engine without checks in Python: those of `torch.autograd.backward` cost 10 us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from schedc_runtime.errors import StageError

_engine = torch.autograd.Variable._execution_engine
"""The engine itself checks the shapes."""

run_backward = _engine.run_backward

_new_tuple: Any = tuple.__new__
PYTHON_NODE = torch._C._FunctionBase
REST = (None,) * (len(GradientEdge._fields) - 2)


def edge_to(node: Any, output: int = 0) -> GradientEdge:
    """The edge to an output of a node. torch's own way to make one takes twice as long."""
    edge: GradientEdge = _new_tuple(GradientEdge, (node, output, *REST))
    return edge


def edge_of(tensor: Tensor) -> GradientEdge | None:
    """Where the gradient of a tensor [...] enters the graph; None if nothing needs the gradient."""
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor) if tensor.requires_grad else None
    if isinstance(node, PYTHON_NODE):  # a node of Python does not keep the graph; torch adds what does
        return get_gradient_edge(tensor)
    edge: GradientEdge = _new_tuple(GradientEdge, (node, tensor.output_nr, *REST))
    return edge


def differentiate(edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """Accumulate into the leaves behind ``edges``, and free the graph.

    grads: one per edge, of the shape of the edge's tensor.
    """
    run_backward(tuple(edges), tuple(grads), False, False, (), True, True)  # allow_unreachable, accumulate_grad


def gradients_at(
    wanted: Sequence[GradientEdge], edges: Sequence[GradientEdge], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """[wanted] the gradient that arrives at each edge of ``wanted``; nothing that leads to none of them is run.

    grads: one per edge of ``edges``, of the shape of the edge's tensor. What was run of the graph is freed.
    """
    arrived: tuple[Tensor | None, ...] = run_backward(
        tuple(edges), tuple(grads), False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )
    return arrived


_WRITTEN = ("leaf Variable that requires grad", "is a view and is being modified inplace")
"""Parts of torch's errors for a stage, or a segment, that writes into its input."""


def refuse_writing(error: RuntimeError, what: str) -> None:
    """Raise a `StageError` if torch's ``error`` says that what was called writes into its input."""
    if any(text in str(error) for text in _WRITTEN):
        remedy = "begin it with an operation that makes a new tensor: x = x + y rather than x += y, and no inplace=True"
        raise StageError(f"{what} ({error})", remedy) from error
