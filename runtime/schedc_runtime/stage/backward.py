"""The steps of a backward: input gradients, exchanges, the stage as one node, and weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from schedc_runtime.errors import StageError
from schedc_runtime.stage.base import StageBase
from schedc_runtime.stage.engine import differentiate
from schedc_runtime.stage.hooks import HookMark
from schedc_runtime.stage.in_flight import ExchangeRecord, MicrobatchState, SegmentRecord, Tensors
from schedc_runtime.stage.taken import Taken

_LOSS = -1
"""Number of the graph of the loss, where segments have those from 0."""


def _loss_key(microbatch: int) -> int:
    """The key of the work that the loss of a microbatch leaves for W. Segments have keys from 0."""
    return -1 - microbatch


class BackwardSteps(StageBase):
    """The steps of a backward."""

    def run_whole_backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, defer: bool
    ) -> tuple[Tensor, ...]:
        """The backward of a stage of one node; gradients in the shapes of both boundaries. See `Stage.backward`."""
        if (record := self._whole.get(microbatch)) is None:
            raise self._not_forwarded(microbatch)
        if self.offload is not None:
            self._end_offload(microbatch)
        del self._whole[microbatch]
        if self._states:
            self._states.pop(microbatch, None)
        leaves, edges, of_loss, began = record
        if of_loss is not None:
            gradients = (*of_loss, *gradients) if self.early else of_loss
        if len(gradients) != len(edges):
            raise self._gradients_missing(gradients)
        if defer or len(edges) != 1 or edges[0] is None or gradients[0] is None:
            entering = zip(edges, gradients, strict=True)
            self._differentiate(microbatch, entering, self._late if defer else None, began)
        else:
            differentiate(edges, gradients)  # type: ignore[arg-type]
        return tuple(map(gradient_of_leaf, leaves))

    def _differentiate(
        self,
        key: int,
        entering: Iterable[tuple[GradientEdge | None, Tensor | None]],
        late: Callable[[nn.Parameter], bool] | None,
        began: HookMark | None = None,
        graph: int = 0,
    ) -> None:
        """The gradients of the inputs of a graph, and without ``late`` those of its weights.

        entering: where gradients enter the graph, with each of them; None is zero. late: which of the weight gradients
        that are computed here wait for W, as all products do, under the ``key``. graph: its number (`SplitBackward`).
        """
        edges: list[GradientEdge] = []
        grads: list[Tensor] = []
        for edge, grad in entering:
            if edge is not None and grad is not None:
                edges.append(edge)
                grads.append(grad)
        if late is not None:
            self._defers = True
            self._split.backward(key, edges, grads, graph=graph, late=late, began=began)
        elif edges:
            differentiate(edges, grads)

    def _gradients_missing(self, gradients: Sequence[Tensor | None]) -> StageError:
        outputs = len(self._output.differentiable)
        return StageError(f"stage {self.index}: {len(gradients)} output gradients for {outputs} outputs")

    def begin_backward(self, microbatch: int, gradients: Sequence[Tensor | None] = ()) -> None:
        """Take the gradients of the differentiable outputs, split into slices. The last stage gets none for its loss.

        gradients: one per differentiable output, of its shape; None is zero.
        """
        states = [self._state(number) for number in self.numbers(microbatch)]
        first, positions = states[0], self._output.differentiable
        self._end_offload(first.number)
        for state in states:
            if state.recorder is not None:
                state.recorder.forwarded()
        if self.loss_fn is not None and first.loss is not None and first.loss_gradient is not None:
            late = (lambda parameter: True) if self.graph.shape.weights else None
            entering = [(first.loss, first.loss_gradient)]
            self._differentiate(_loss_key(microbatch), entering, late, graph=_LOSS)
        if self.loss_fn is not None and not self.early:
            gradients = [first.joined[position].grad for position in positions] if first.joined else ()
        elif len(gradients) != len(positions):
            raise self._gradients_missing(gradients)
        if gradients:
            for state, part in zip(states, self._exit.split_gradients(gradients), strict=True):
                for position, gradient in zip(positions, part, strict=True):
                    if gradient is not None and (taken := state.sent[position]) is not None:
                        taken.add(gradient)
        for state in states:
            for value, leaves in state.leaving:
                state.give(value, len(self.graph.nodes), leaves)
            state.leaving, state.sent, state.joined, state.loss, state.loss_gradient = [], (), (), None, None

    def run_backward(self, microbatch: int, node: int) -> None:
        """Compute the input gradients of a segment. `run_weight` computes its weight gradients."""
        number, node = self._at(microbatch, node)
        state, segment = self._state(number), self._segment(node)
        record = state.pop(node, SegmentRecord)
        entering = [
            pair
            for value, edges in zip(segment.gives, record.edges, strict=True)
            for pair in zip(edges, state.summed(value, len(edges)), strict=True)
        ]
        self._differentiate(self._key(number, node), entering, self._late_in.get(node), record.began, node)
        for value, leaves in zip(segment.takes, record.leaves, strict=True):
            state.give(value, node, leaves)

    def start_backward(self, microbatch: int, node: int) -> None:
        """Start sending back the gradients of an exchange. Sends nothing where no rank needs gradients."""
        number, node = self._at(microbatch, node)
        state, communication = self._state(number), self._communication(node)
        record = state.done.get(node)
        if not isinstance(record, ExchangeRecord):
            raise StageError(
                f"stage {self.index}: {communication.name} of microbatch {microbatch} has not been forwarded"
            )
        if not any(record.wanted):
            return
        by_element = {
            element: state.summed(value, 1)[0]
            for value, element in zip(communication.gives, communication.elements, strict=True)
        }
        gradients = [
            torch.zeros(shape, dtype=dtype, device=device) if (grad := by_element.get(element)) is None else grad
            for element, (shape, dtype, device) in enumerate(record.received)
        ]
        with torch.no_grad():
            state.pending[node] = communication.exchange.start_backward(record.route, *gradients)

    def wait_backward(self, microbatch: int, node: int) -> None:
        """Wait for the gradients that an exchange sends back."""
        number, node = self._at(microbatch, node)
        state, communication = self._state(number), self._communication(node)
        record = state.pop(node, ExchangeRecord)
        if not any(record.wanted):
            return
        back = communication.exchange.finish_backward(state.started(node, "backward"))
        for value, gradient, wanted in zip(communication.takes[1:], back, record.wanted, strict=True):
            if wanted:
                state.add(value, node, (gradient,))

    def end_backward(self, microbatch: int) -> None:
        """Forget a microbatch whose backward steps have all run."""
        for number in self.numbers(microbatch):
            state = self._state(number)
            if in_flight := {*state.pending, *(state.recompute.pending if state.recompute else ())}:
                names = [self.graph.nodes[node].name for node in sorted(in_flight)]
                raise StageError(f"stage {self.index}: microbatch {microbatch} ends while {names} are in flight")
            del self._states[number]

    def input_gradients(self, microbatch: int) -> Tensors:
        """The gradient of each differentiable input, joined."""
        return self._entry.join_gradients([self._gradients_of(self._state(n)) for n in self.numbers(microbatch)])

    def _gradients_of(self, state: MicrobatchState) -> Tensors:
        """The gradients of the inputs of a slice."""
        gradients: list[Tensor | None] = []
        for value, tensors in enumerate(self._entry_widths):
            gradients += state.summed(value, tensors)
        entered = self._entry.part
        return tuple(
            torch.zeros(x.shape, dtype=x.dtype, device=state.device) if (g := gradients[i]) is None else g
            for i, x in ((i, entered.tensors[i]) for i in entered.differentiable)
        )

    def run_weight(self, microbatch: int, node: int) -> None:
        """Add the weight gradients of a segment to those of its parameters.

        Segments that share a parameter add in descending order: a segment waits for those behind it. The loss is behind
        all of them.
        """
        if (key := _loss_key(microbatch)) in self._split.pending:
            self._split.weight(key)
        number, node = self._at(microbatch, node)
        group = self.graph.sharing.get(node, (node,))
        waiting = self._waiting.setdefault(number, set())
        waiting.add(node)
        for member in reversed(group):
            if member not in waiting:
                return
            if (key := self._key(number, member)) in self._split.pending:
                self._split.weight(key)
        waiting.difference_update(group)
        if not waiting:
            del self._waiting[number]

    def start_weight(self, microbatch: int, node: int) -> None:
        """Start to return gradients of what an exchange has brought, of which the W of its takers has made them."""
        number, own = self._at(microbatch, node)
        route, _ = self._returning.get(number, {}).get(own, (None, None))
        self._returning[number][own] = (route, self._communication(own).exchange.start_return(route))

    def wait_weight(self, microbatch: int, node: int) -> None:
        """Add the gradients that an exchange has returned to those of parameters."""
        number, own = self._at(microbatch, node)
        route, pending = self._returning[number].pop(own)
        if not self._returning[number]:
            del self._returning[number]
        self._communication(own).exchange.finish_return(route, pending)

    @property
    def _entry_widths(self) -> list[int]:
        """[inputs] number of tensors inside each value that enters the stage."""
        tree: Any = self._entry.part.tree
        widths = [0] * tree.num_children
        first = 0
        for value, child in enumerate(tree.children()):
            entries = self._entry.part.entries[first : first + child.num_leaves]
            widths[value] = sum(entry in self._entry.part.tensors for entry in entries)
            first += child.num_leaves
        return widths


def gradient_of_leaf(leaf: Tensor | Taken) -> Tensor:
    """The gradient of a leaf, of its shape; zeros where none has come."""
    if (grad := leaf.grad) is not None:
        return grad
    return leaf.zeros() if isinstance(leaf, Taken) else torch.zeros_like(leaf)
