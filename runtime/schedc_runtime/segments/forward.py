"""The micro-steps of a forward through a segmented stage: segments, exchanges, and the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from schedc_runtime.errors import StageError
from schedc_runtime.partition.recorded_stage import RecordedStage
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.recompute.whole_stage import save_nothing
from schedc_runtime.segments.base import SegmentedBase
from schedc_runtime.segments.graph import Segment, Slot
from schedc_runtime.segments.in_flight import (
    ExchangeRecord,
    MicrobatchState,
    SegmentRecord,
    Tensors,
    cut_off,
    not_held,
    own_leaves,
    own_views,
    tensors_in,
)
from schedc_runtime.segments.recompute import SegmentRecompute
from schedc_runtime.stage.engine import edge_of
from schedc_runtime.stage.hooks import hook_mark
from schedc_runtime.stage.offloaded import KeptInputs
from schedc_runtime.stage.stage import WRITTEN, check_loss, device_holding
from schedc_runtime.stage.taken import Taken


class ForwardSteps(SegmentedBase):
    """The micro-steps of a forward."""

    def begin(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        target: Any = None,
        loss_scale: float = 1.0,
        *,
        recompute_later: bool = False,
    ) -> None:
        """Take the tensors of the input boundary, in its shapes; see `Stage.forward`."""
        if microbatch in self.in_flight:
            raise StageError(f"stage {self.index}: microbatch {microbatch} is forwarded again before its backward")
        graph, memory = (self.graph_with_r, self._memory_with_r) if recompute_later else (self.graph, self._memory)
        leaves = self._detach(inputs) if torch.is_grad_enabled() else tuple(inputs)
        values = dict(enumerate(self._input.unpack(leaves)))
        uses = [len(nodes) for nodes in graph.consumers]
        state = MicrobatchState(graph, self.index, values, uses, target, loss_scale, device_holding(leaves))
        self._states[microbatch] = state
        offload = self.offload.begin(microbatch) if self.offload is not None and torch.is_grad_enabled() else None
        if recompute_later and self.recomputes_whole and torch.is_grad_enabled():
            # Before the seed is drawn: the second run draws it again.
            checkpoint = self._checkpoints.begin(state.device)
            state.kept = KeptInputs(tuple(inputs), target, loss_scale, checkpoint)
        elif torch.is_grad_enabled() and (memory.active or offload is not None):
            state.recorder = memory.recorder(offload)
            state.recompute = SegmentRecompute(graph, state.recorder)
        if session() is None and self.module.training and self._draws:
            state.seed = int(torch.randint(2**62, (), dtype=torch.int64))

    def run(self, microbatch: int, node: int) -> None:
        """The forward of a segment."""
        state, segment, began = self._state(microbatch), self._segment(node), hook_mark() if self._defers else None
        values = [(value, state.value(value, node)) for value in segment.takes]
        enter = not_held if state.recorder else own_views if _autocast(state) else own_leaves
        taken: list[tuple[Any, Any]] = [enter(value) for _, value in values]
        with self._random(microbatch, state, node), self._recording(state, node):
            inputs = [value for value, _ in taken]
            results = self._replayed(state, node, inputs) or self._called(segment, inputs)
        if state.recompute is not None:
            state.recompute.forwarded(node, values)
        if torch.is_grad_enabled() and state.kept is None:
            edges = tuple([tuple(map(edge_of, tensors_in(value))) for value in results])
            state.done[node] = SegmentRecord(tuple([leaves for _, leaves in taken]), edges, began)
        state.values |= {value: cut_off(result) for value, result in zip(segment.gives, results, strict=True)}
        state.took(segment.takes)

    def _recording(self, state: MicrobatchState, node: int) -> AbstractContextManager[None]:
        if state.kept is not None:
            return save_nothing()
        if state.recorder is None:
            return nullcontext()
        state.recorder.layer = self.shape.nodes[node].layer
        return state.recorder.forwarding(node, node in state.recorder.plan.replayed)

    def start(self, microbatch: int, node: int) -> None:
        """Start an exchange; returns at once."""
        state, communication = self._state(microbatch), self._communication(node)
        taken: list[Any] = [None if value < 0 else state.value(value, node) for value in communication.takes]
        route, payload = taken[0], taken[1:]
        with torch.no_grad():
            state.pending[node] = communication.exchange.start(route, *[tensor.detach() for tensor in payload])
        wanted = tuple([communication.exchange.differentiable and tensor.requires_grad for tensor in payload])
        state.done[node] = ExchangeRecord(route, wanted, ())
        state.took(communication.takes)

    def ready(self, microbatch: int, node: int) -> bool:
        """Whether `wait` would return without waiting for another rank of this process."""
        state = self._state(microbatch)
        return node not in state.pending or self._communication(node).exchange.ready(state.pending[node])

    def wait(self, microbatch: int, node: int) -> None:
        """Wait for an exchange that was started, and take what it brought."""
        state, communication = self._state(microbatch), self._communication(node)
        received = communication.exchange.finish(state.started(node, "forward"))
        record = state.done[node]
        assert isinstance(record, ExchangeRecord)
        state.done[node] = record._replace(received=tuple((t.shape, t.dtype, t.device) for t in received))
        for value, element in zip(communication.gives, communication.elements, strict=True):
            wanted = element < len(record.wanted) and record.wanted[element]
            state.values[value] = received[element].detach().requires_grad_(wanted)
        if state.recompute is not None:
            state.recompute.arrived(node, received)

    # One exchange for several microbatches, such as the slices of one. Its payload is the sum of theirs.

    def start_together(self, microbatches: Sequence[int], node: int) -> Any:
        """Start an exchange without a route and without gradients; returns what is in flight."""
        communication = self._communication(node)
        payloads: list[list[Tensor]] = []
        for microbatch in microbatches:
            state = self._state(microbatch)
            payloads.append([state.value(value, node).detach() for value in communication.takes[1:]])
            state.took(communication.takes)
        with torch.no_grad():
            return communication.exchange.start(
                None, *[reduce(torch.add, each) for each in zip(*payloads, strict=True)]
            )

    def ready_together(self, node: int, pending: Any) -> bool:
        """Whether `wait_together` would return without waiting for another rank of this process."""
        return self._communication(node).exchange.ready(pending)

    def wait_together(self, microbatches: Sequence[int], node: int, pending: Any) -> None:
        """Wait for what `start_together` has started. All microbatches take what it brings."""
        communication = self._communication(node)
        received = communication.exchange.finish(pending)
        for microbatch in microbatches:
            values = self._state(microbatch).values
            for value, element in zip(communication.gives, communication.elements, strict=True):
                values[value] = received[element].detach()

    def outputs(self, microbatch: int) -> Tensors:
        """The tensors of the output boundary, detached. The last stage computes the loss from them."""
        state = self._state(microbatch)
        enter = not_held if torch.is_grad_enabled() and self.loss_fn is not None else own_leaves
        here: dict[int, tuple[Any, Any]] = {
            value: enter(state.value(value, len(self.graph.nodes))) for value in set(self.graph.leaving)
        }
        result = fx.node.map_aggregate(self.graph.output, lambda x: here[x.value][0] if isinstance(x, Slot) else x)
        if isinstance(self.module, RecordedStage):
            result = self.module.finished(result)
        if torch.is_grad_enabled():
            self._leave(state, {value: leaves for value, (_, leaves) in here.items()}, result)
        if self.loss_fn is not None and (torch.is_grad_enabled() or state.target is not None):
            last_run = torch.is_grad_enabled() and state.kept is None  # a loss may add gradients at once
            with self.drawing(microbatch, len(self.graph.nodes)), torch.set_grad_enabled(last_run):
                loss = self._loss_of(self.loss_fn, result, state.target, state.recorder)
            self._form_loss(microbatch, state, loss)
        state.took(tuple(here))
        if state.kept is not None:
            self._checkpoints.end(state.kept.checkpoint)
            self.kept[microbatch] = state.kept
        if state.kept is not None or not torch.is_grad_enabled():
            del self._states[microbatch]
        return tuple([tensor.detach() for tensor in self._output.pack(result)])

    def _leave(self, state: MicrobatchState, leaves: dict[int, Any], result: Any) -> None:
        """Hold no output: its gradient is all that the backward takes. leaves: those of ``result``, by value."""
        if self.loss_fn is not None:
            state.leaving = list(leaves.items())
            return
        taken = {id(leaf): Taken(leaf) for own in leaves.values() for leaf in own}
        state.leaving = [(value, tuple([taken[id(leaf)] for leaf in own])) for value, own in leaves.items()]
        state.sent = tuple([taken.get(id(t)) if t.requires_grad else None for t in self._output.pack(result)])

    def _form_loss(self, microbatch: int, state: MicrobatchState, loss: Tensor) -> None:
        check_loss(loss)
        self.losses[microbatch] = loss.detach()
        if torch.is_grad_enabled():
            state.loss, state.loss_gradient = edge_of(loss), self._loss_gradient(loss, state.loss_scale)

    def _replayed(self, state: MicrobatchState, node: int, taken: Sequence[Any]) -> tuple[Any, ...] | None:
        """What a captured segment gives; None where it is launched as ever."""
        if self.captures is None or not torch.is_grad_enabled():
            return None
        obstacle = "autocast" if _autocast(state) else ""
        if state.recorder is not None or state.kept is not None:
            obstacle = "its stage recomputes, or moves activations to the host"
        return self.captures.run(self.graph, self.module, node, taken, obstacle)

    def _called(self, segment: Segment, taken: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return segment.run(self.module, *taken)
        except RuntimeError as error:
            if not any(text in str(error) for text in WRITTEN):
                raise
            raise StageError(
                f"stage {self.index}: {segment.name} writes into a value of another segment ({error})",
                "begin it with an operation that makes a new tensor: x = x + y rather than x += y, and no inplace=True",
            ) from error


def _autocast(state: MicrobatchState) -> bool:
    return torch.is_autocast_enabled(state.device.type)
