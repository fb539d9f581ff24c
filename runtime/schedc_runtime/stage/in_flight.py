"""The state of a microbatch in flight through a stage: values, leaves of its nodes, and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from schedc_runtime.errors import StageError
from schedc_runtime.segments.graph import StageGraph
from schedc_runtime.stage.hooks import HookMark
from schedc_runtime.stage.taken import Taken, let_go

if TYPE_CHECKING:
    from schedc_runtime.recompute.levels import MicrobatchRecorder
    from schedc_runtime.recompute.whole_stage import Checkpoint
    from schedc_runtime.segments.recompute import SegmentRecompute
    from schedc_runtime.stage.offloaded import KeptInputs

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
"""Gradients of the tensors inside one value, in order; None is zero."""


class WholeRecord(NamedTuple):
    """What the backward of a stage of one node needs.

    leaves: the leaves of the differentiable inputs, of their shapes. Where a recorder says what is saved, they are not
        held. edges: where gradients enter the graph, per differentiable output; that of the loss, on the last stage. An
        early loss comes before the outputs.
    gradients: the loss scale, where a loss is formed; else None. began: as of a `SegmentRecord`.
    """

    leaves: Sequence[Tensor | Taken]
    edges: Sequence[GradientEdge | None]
    gradients: tuple[Tensor] | None
    began: HookMark | None


class SegmentRecord(NamedTuple):
    """What the backward of a segment needs.

    leaves: [values taken] the segment's own leaves, per tensor of the value, of its shape. Where a recorder says what
        is saved, they are not held.
    edges: [values made] where gradients enter the segment's graph, per tensor of the value.
    began: when the forward began; None before the first split backward.
    """

    leaves: tuple[tuple[Tensor | Taken, ...], ...]
    edges: tuple[tuple[GradientEdge | None, ...], ...]
    began: HookMark | None


class ExchangeRecord(NamedTuple):
    """What the backward of an exchange needs.

    wanted: whether each tensor of the payload needs a gradient. received: shape, dtype and device of each tensor that
    the exchange returned.
    """

    route: Any
    wanted: tuple[bool, ...]
    received: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


class LossEdge(NamedTuple):
    """The start of the backward of a last stage.

    edge: where the gradient of the loss enters its graph; None if nothing needs it. gradient: the loss scale, a scalar.
    """

    edge: GradientEdge | None
    gradient: Tensor


class MicrobatchState:
    """A slice of a microbatch between its forward and the end of its backward.

    stage: number of the stage, for messages. number: microbatch * slices + slice, by which it draws random numbers.
    target, loss_scale: those of `Stage.forward`; the first slice has what concerns the loss.
    """

    # A state is made for each op F, so that defaults stand in the class. A stage of one node has no uses, device,
    # pending and gradients.
    uses: list[int]
    """[values] number of nodes that have yet to take each value. The last one frees it."""
    device: torch.device
    pending: dict[int, Any]
    """Exchanges in flight by node, of the forward or of the backward."""
    gradients: dict[int, dict[int, Gradients]]
    """Parts of the gradients, by value and by the node that took the value."""
    leaving: Sequence[tuple[int, tuple[Taken, ...]]] = ()
    """The values of the stage's output, each with what collects the gradients of its tensors."""
    sent: tuple[Taken | None, ...] = ()
    """[tensors of the output boundary] what collects the gradient of each; None where it needs none."""
    joined: tuple[Taken, ...] = ()
    """[tensors of the output boundary] what collects the gradients that the loss gives to joined slices."""
    loss: GradientEdge | None = None
    """Where the gradient of the loss enters the graph."""
    loss_gradient: Tensor | None = None
    """[] the loss scale, on a stage that forms the loss."""
    seed: int = 0
    """Seed of the random numbers that the segments draw."""
    recorder: MicrobatchRecorder | None = None
    """Records what is saved; None if nothing is recomputed."""
    recompute: SegmentRecompute | None = None
    kept: KeptInputs | None = None
    """The inputs, if an R will run the whole stage a second time. Nothing else is held then."""
    recomputed: bool = False
    """Whether an R has run."""
    checkpoint: Checkpoint | None = None
    """The start of the forward, while an R runs the whole stage a second time."""

    def __init__(
        self, graph: StageGraph, stage: int, number: int, values: dict[int, Any], target: Any, loss_scale: float
    ) -> None:
        self.graph, self.stage, self.number = graph, stage, number
        self.values = values
        """The values that some node has yet to take, by number."""
        self.target, self.loss_scale = target, loss_scale
        self.done: dict[int, SegmentRecord | ExchangeRecord] = {}

    def value(self, value: int, node: int) -> Any:
        """The value of that number, taken by ``node``. Raises `StageError` if no node has made it."""
        if value not in self.values:
            maker = self.graph.nodes[self.graph.maker[value]].name if value in self.graph.maker else "an input"
            taker = self.graph.nodes[node].name if node < len(self.graph.nodes) else "the output"
            raise StageError(f"stage {self.stage}: {taker} takes a value of {maker} before it is there")
        return self.values[value]

    def took_to_send(self, node: int, takes: Sequence[int], values: Sequence[Any]) -> None:
        """An exchange has taken its ``values``, of the numbers ``takes``."""
        if self.recompute is not None:
            self.recompute.sent(node, values)
        self.took(takes)

    def took(self, values: Iterable[int]) -> None:
        """A node has taken these values: free those that no other node will take."""
        for value in dict.fromkeys(values):
            if value >= 0:
                self.uses[value] -= 1
                if not self.uses[value]:
                    del self.values[value]

    def started(self, node: int, half: str) -> Any:
        """Remove and return the exchange in flight at ``node``."""
        if node not in self.pending:
            raise StageError(f"stage {self.stage}: the {half} of {self.graph.nodes[node].name} was not started")
        return self.pending.pop(node)

    def pop(self, node: int, kind: type) -> Any:
        """Remove and return the record that the forward of ``node`` left for its backward."""
        record = self.done.pop(node, None)
        if not isinstance(record, kind):
            raise StageError(f"stage {self.stage}: {self.graph.nodes[node].name} has no forward to differentiate")
        return record

    def give(self, value: int, node: int, leaves: Sequence[Tensor | Taken]) -> None:
        """Add the gradients of a node's leaves for ``value`` to the gradient of the value."""
        if any(leaf.grad is not None for leaf in leaves):
            self.add(value, node, tuple(leaf.grad for leaf in leaves))

    def add(self, value: int, node: int, gradients: Gradients) -> None:
        """Add the part of a value's gradient that comes from ``node``."""
        parts = self.gradients.setdefault(value, {})
        if node in parts:  # a value that an exchange carries twice
            gradients = tuple(map(plus, parts[node], gradients))
        parts[node] = gradients

    def summed(self, value: int, tensors: int) -> Gradients:
        """The gradients of a value: summed over the nodes that took it, in ascending order of nodes."""
        parts = self.gradients.pop(value, {})
        total: Gradients = (None,) * tensors
        for node in sorted(parts):
            total = tuple(map(plus, total, parts[node]))
        return total


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients of one shape [...]; None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def tensors_in(value: Any) -> Tensors:
    """The tensors inside a value. An object such as a route has none: it carries no gradient."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list, dict)):
        return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return ()


def own_leaves(value: Any) -> tuple[Any, Tensors]:
    """(``value`` with new leaves in place of its tensors, the leaves)."""
    if isinstance(value, Tensor):
        leaf = value.detach().requires_grad_(value.requires_grad and torch.is_grad_enabled())
        return leaf, (leaf,)
    copied = cut_off(value)
    return copied, tensors_in(copied)


def own_views(value: Any) -> tuple[Any, Tensors]:
    """As `own_leaves`, but the segment computes with views of the leaves.

    Autocast takes a leaf for a weight and keeps a narrow copy of it until its context ends. Gradients of all uses would
    be summed through that copy, in the narrow type.
    """
    inside, leaves = own_leaves(value)
    return (pytree.tree_map_only(Tensor, lambda leaf: leaf.view_as(leaf), inside) if leaves else inside), leaves


def not_held(value: Any) -> tuple[Any, tuple[Taken, ...]]:
    """As `own_leaves`, but the graph holds only what it saves for the backward, and no leaves."""
    taken: list[Taken] = []

    def enter(tensor: Tensor) -> Tensor:
        entered, its = let_go(tensor)
        taken.append(its)
        return entered

    inside = pytree.tree_map_only(Tensor, enter, value) if tensors_in(value) else value
    return inside, tuple(taken)


def cut_off(value: Any) -> Any:
    """``value`` detached from its graph; its tensors still say whether they need a gradient."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list, dict)):
        return pytree.tree_map_only(Tensor, cut_off, value)
    return value
