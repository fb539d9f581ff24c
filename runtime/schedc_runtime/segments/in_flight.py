"""A microbatch in flight through a segmented stage: its values, the leaves of its segments, and its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from schedc_runtime.errors import StageError
from schedc_runtime.segments.graph import StageGraph

if TYPE_CHECKING:
    from schedc_runtime.recompute.levels import MicrobatchRecorder
    from schedc_runtime.recompute.whole_stage import Checkpoint
    from schedc_runtime.segments.recompute import SegmentRecompute
    from schedc_runtime.stage.stage import KeptInputs

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
"""Of the tensors inside one value, in order; None is zero."""


class SegmentRecord(NamedTuple):
    """What the backward of a segment needs: its own leaves, per value it took, and where gradients enter its graph."""

    leaves: tuple[tuple[Tensor | Taken, ...], ...]
    edges: tuple[tuple[GradientEdge | None, ...], ...]


class ExchangeRecord(NamedTuple):
    """What the backward of an exchange needs: its route, which of its payload want gradients, what it gave."""

    route: Any
    wanted: tuple[bool, ...]
    given: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


@dataclass
class MicrobatchState:
    """A microbatch between its forward and the end of its backward.

    stage: its number, for messages. values: those made and not yet taken by all that take them, by number.
    """

    graph: StageGraph
    stage: int
    values: dict[int, Any]
    uses: list[int]
    """[values] how many nodes have yet to take each value; it is let go of with the last."""
    target: Any
    loss_scale: float
    device: torch.device
    done: dict[int, SegmentRecord | ExchangeRecord] = field(default_factory=dict)
    pending: dict[int, Any] = field(default_factory=dict)
    """Exchanges under way by node, of the forward or of the backward."""
    gradients: dict[int, dict[int, Gradients]] = field(default_factory=dict)
    """By value, then by the node that took it."""
    leaving: list[tuple[int, Tensors]] = field(default_factory=list)
    """The values of the output with the leaves that stand for them there."""
    sent: Tensors = ()
    loss: GradientEdge | None = None
    seed: int = 0
    """Of the random numbers of its segments, where they draw any."""
    recorder: MicrobatchRecorder | None = None
    """Where something is recomputed."""
    recompute: SegmentRecompute | None = None
    kept: KeptInputs | None = None
    """Where all of it runs once more, and nothing else is kept."""
    recomputed: bool = False
    """Whether an R has done what is done once more."""
    checkpoint: Checkpoint | None = None
    """While an R runs all of it once more: what the forward depended on."""

    def value(self, value: int, node: int) -> Any:
        """The value of that number, for ``node``; raises `StageError` if it is not there."""
        if value not in self.values:
            maker = self.graph.nodes[self.graph.maker[value]].name if value in self.graph.maker else "an input"
            taker = self.graph.nodes[node].name if node < len(self.graph.nodes) else "the output"
            raise StageError(f"stage {self.stage}: {taker} takes a value of {maker} before it is there")
        return self.values[value]

    def took(self, values: Iterable[int]) -> None:
        """A node has taken these values: let go of those that no other will take."""
        for value in dict.fromkeys(values):
            if value >= 0:
                self.uses[value] -= 1
                if not self.uses[value]:
                    del self.values[value]

    def started(self, node: int, half: str) -> Any:
        """The exchange under way at ``node``, which is now waited for."""
        if node not in self.pending:
            raise StageError(f"stage {self.stage}: the {half} of {self.graph.nodes[node].name} was not started")
        return self.pending.pop(node)

    def pop(self, node: int, kind: type) -> Any:
        """What the forward of ``node`` has left for its backward, a `SegmentRecord` or a `ExchangeRecord`."""
        done = self.done.pop(node, None)
        if not isinstance(done, kind):
            raise StageError(f"stage {self.stage}: {self.graph.nodes[node].name} has no forward to differentiate")
        return done

    def give(self, value: int, node: int, leaves: Sequence[Tensor | Taken]) -> None:
        """The gradients of a node's own leaves for ``value`` become its part of the value's."""
        if any(leaf.grad is not None for leaf in leaves):
            self.add(value, node, tuple(leaf.grad for leaf in leaves))

    def add(self, value: int, node: int, gradients: Gradients) -> None:
        """The part of a value's gradient that comes from ``node``."""
        parts = self.gradients.setdefault(value, {})
        if node in parts:  # a value that an exchange carries twice
            gradients = tuple(map(plus, parts[node], gradients))
        parts[node] = gradients

    def summed(self, value: int, tensors: int) -> Gradients:
        """The gradients of a value: the sum over the nodes that took it, in ascending order."""
        parts = self.gradients.pop(value, {})
        total: Gradients = (None,) * tensors
        for node in sorted(parts):
            total = tuple(map(plus, total, parts[node]))
        return total


def plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients, None being zero."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def tensors_in(value: Any) -> Tensors:
    """The tensors inside a value; of an object such as a route none, which carries no gradient."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list, dict)):
        return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return ()


def own_leaves(value: Any) -> tuple[Any, Tensors]:
    """``value`` with leaves of its own in the places of its tensors, and these."""
    if isinstance(value, Tensor):
        leaf = value.detach().requires_grad_(value.requires_grad and torch.is_grad_enabled())
        return leaf, (leaf,)
    copied = cut_off(value)
    return copied, tensors_in(copied)


def own_views(value: Any) -> tuple[Any, Tensors]:
    """As `own_leaves`, but what computes gets views of them: autocast takes a leaf for a weight, whose narrow copy it
    keeps until its context ends, and through which the gradients of all uses are summed in the narrow type."""
    inside, leaves = own_leaves(value)
    return (pytree.tree_map_only(Tensor, lambda leaf: leaf.view_as(leaf), inside) if leaves else inside), leaves


class Taken:
    """Stands for a tensor that a segment took, and does not hold it: only its gradient, laid out like the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.grad: Tensor | None = None
        dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        self.stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()

    def take(self, grad: Tensor) -> None:
        if grad.stride() != self.stride:
            grad = torch.empty_strided(grad.shape, self.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        self.grad = grad


def not_held(value: Any) -> tuple[Any, tuple[Taken, ...]]:
    """As `own_leaves`, but the graph holds of a tensor only what it saves of it."""
    taken: list[Taken] = []

    def enter(tensor: Tensor) -> Tensor:
        taken.append(Taken(tensor))
        if not tensor.requires_grad:
            return tensor.detach()
        entered: Tensor = _Enter.apply(_anchor, tensor.detach(), taken[-1])  # type: ignore[no-untyped-call]
        return entered

    inside = pytree.tree_map_only(Tensor, enter, value) if tensors_in(value) else value
    return inside, tuple(taken)


class _Enter(torch.autograd.Function):
    """Where a graph begins: the gradient goes to a `Taken`. The anchor makes autograd come here."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, taken: Taken) -> Tensor:
        ctx.taken = taken
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.taken.take(grad)
        return None, None, None


_anchor = torch.zeros((), requires_grad=True)


def cut_off(value: Any) -> Any:
    """``value`` cut off from what made it; its tensors still say whether they want a gradient."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list, dict)):
        return pytree.tree_map_only(Tensor, cut_off, value)
    return value


def edge_of(tensor: Tensor) -> GradientEdge | None:
    """Where the gradient of a tensor enters the graph; None if nothing wants it."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None
