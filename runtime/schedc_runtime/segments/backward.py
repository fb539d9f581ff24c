"""The backward of a segmented stage in micro-steps: input gradients, exchanges, and weight gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedc_runtime.errors import StageError
from schedc_runtime.segments.base import SegmentedBase
from schedc_runtime.segments.in_flight import ExchangeRecord, SegmentRecord, Tensors
from schedc_runtime.stage.stage import differentiate
from schedc_runtime.stage.weight_gradients import unhooked


class BackwardSteps(SegmentedBase):
    """The micro-steps of a backward."""

    def begin_backward(self, microbatch: int, gradients: Sequence[Tensor | None] = ()) -> None:
        """Take the gradients of the differentiable outputs; none on a stage that forms the loss."""
        state = self._state(microbatch)
        if state.recorder is not None:
            state.recorder.forwarded()
        if self.loss_fn is not None:
            if state.loss is not None:
                differentiate((state.loss,), (self._one,))
        else:
            places = self._output.differentiable
            if len(gradients) != len(places):
                raise StageError(f"stage {self.index}: {len(gradients)} output gradients for {len(places)} outputs")
            for place, gradient in zip(places, gradients, strict=True):
                leaf = state.sent[place]
                if gradient is not None and leaf.requires_grad:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        for value, leaves in state.leaving:
            state.give(value, len(self.graph.nodes), leaves)
        state.leaving, state.sent, state.loss = [], (), None

    def run_backward(self, microbatch: int, node: int) -> None:
        """The input gradients of a segment; its weight gradients are left to `run_weight`."""
        state, segment = self._state(microbatch), self._segment(node)
        ran = state.pop(node, SegmentRecord)
        pairs = [
            (edge, gradient)
            for value, edges in zip(segment.gives, ran.edges, strict=True)
            for edge, gradient in zip(edges, state.summed(value, len(edges)), strict=True)
            if edge is not None and gradient is not None
        ]
        if pairs:
            self._differentiate_segment(microbatch, node, pairs)
        for value, leaves in zip(segment.takes, ran.leaves, strict=True):
            state.give(value, node, leaves)

    def _differentiate_segment(self, microbatch: int, node: int, pairs: Sequence[tuple[GradientEdge, Tensor]]) -> None:
        """What autograd itself adds to a vector, or to a parameter of several segments, becomes weight work as well."""
        key = self._key(microbatch, node)
        shared, vectors = self._late.get(node, ((), ()))
        with self._sink.deferring(key, (*shared, *unhooked(vectors))):
            differentiate(tuple([edge for edge, _ in pairs]), tuple([gradient for _, gradient in pairs]))
        if not self._sink.pending[key]:
            del self._sink.pending[key]

    def start_backward(self, microbatch: int, node: int) -> None:
        """Start sending the gradients of an exchange back; nothing where none are wanted, which all ranks know."""
        state, moving = self._state(microbatch), self._communication(node)
        moved = state.done.get(node)
        if not isinstance(moved, ExchangeRecord):
            raise StageError(f"stage {self.index}: {moving.name} of microbatch {microbatch} has not been forwarded")
        if not any(moved.wanted):
            return
        found = {
            element: state.summed(value, 1)[0] for value, element in zip(moving.gives, moving.elements, strict=True)
        }
        gradients = [
            torch.zeros(shape, dtype=dtype, device=device) if (grad := found.get(element)) is None else grad
            for element, (shape, dtype, device) in enumerate(moved.given)
        ]
        with torch.no_grad():
            state.pending[node] = moving.exchange.start_backward(moved.route, *gradients)

    def wait_backward(self, microbatch: int, node: int) -> None:
        """Wait for the gradients of an exchange."""
        state, moving = self._state(microbatch), self._communication(node)
        moved = state.pop(node, ExchangeRecord)
        if not any(moved.wanted):
            return
        back = moving.exchange.finish_backward(state.started(node, "backward"))
        for value, gradient, wanted in zip(moving.takes[1:], back, moved.wanted, strict=True):
            if wanted:
                state.add(value, node, (gradient,))

    def end_backward(self, microbatch: int) -> None:
        """Let go of a microbatch whose backward steps have all run."""
        state = self._state(microbatch)
        if under_way := {*state.pending, *(state.recompute.pending if state.recompute else ())}:
            names = [self.graph.nodes[node].name for node in sorted(under_way)]
            raise StageError(f"stage {self.index}: microbatch {microbatch} ends while {names} are under way")
        del self._states[microbatch]

    def input_gradients(self, microbatch: int) -> Tensors:
        """The gradient of each differentiable input."""
        state = self._state(microbatch)
        found: list[Tensor | None] = []
        for value, tensors in enumerate(self._entry_widths):
            found += state.summed(value, tensors)
        specs = self._input.tensors
        return tuple(
            torch.zeros(specs[at].shape, dtype=specs[at].dtype, device=state.device) if (g := found[at]) is None else g
            for at in self._input.differentiable
        )

    def run_weight(self, microbatch: int, node: int) -> None:
        """Add the weight gradients of a segment to the parameters'.

        Of segments that share a parameter the last one adds first: the others wait for those behind them.
        """
        group = self.graph.sharing.get(node, (node,))
        asked = self._asked.setdefault(microbatch, set())
        asked.add(node)
        for member in reversed(group):
            if member not in asked:
                return
            if (key := self._key(microbatch, member)) in self._sink.pending:
                self._sink.flush(key)
        asked.difference_update(group)
        if not asked:
            del self._asked[microbatch]

    @property
    def _entry_widths(self) -> list[int]:
        """How many tensors are inside each value that enters."""
        tree: Any = self._input.tree
        widths = [0] * tree.num_children
        place = 0
        for value, child in enumerate(tree.children()):
            entries = self._input.entries[place : place + child.num_leaves]
            widths[value] = sum(entry in self._input.tensors for entry in entries)
            place += child.num_leaves
        return widths
