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
from schedc_runtime.stage.engine import edge_of, refuse_writing
from schedc_runtime.stage.hooks import hook_mark
from schedc_runtime.stage.offloaded import KeptInputs
from schedc_runtime.stage.stage import check_loss, device_holding
from schedc_runtime.stage.taken import Taken, let_go


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
        """Take the tensors of the input boundary, in its shapes, split into slices; see `Stage.forward`."""
        if microbatch in self.in_flight:
            raise StageError(f"stage {self.index}: microbatch {microbatch} is forwarded again before its backward")
        for number, part in zip(self.numbers(microbatch), self._entry.split(inputs), strict=True):
            self._begin(number, part, target, loss_scale, recompute_later)

    def _begin(
        self, number: int, inputs: Sequence[Tensor], target: Any, loss_scale: float, recompute_later: bool = False
    ) -> None:
        graph, memory = (self.graph_with_r, self._memory_with_r) if recompute_later else (self.graph, self._memory)
        leaves = self._detach(inputs) if torch.is_grad_enabled() else tuple(inputs)
        values = dict(enumerate(self._entry.part.unpack(leaves)))
        uses = [len(nodes) for nodes in graph.consumers]
        state = MicrobatchState(graph, self.index, number, values, uses, target, loss_scale, device_holding(leaves))
        self._states[number] = state
        offload = self.offload.begin(number) if self.offload is not None and torch.is_grad_enabled() else None
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
        number, node = self._at(microbatch, node)
        state, segment, began = self._state(number), self._segment(node), hook_mark() if self._defers else None
        values = [(value, state.value(value, node)) for value in segment.takes]
        enter = not_held if state.recorder else own_views if _autocast(state) else own_leaves
        taken: list[tuple[Any, Any]] = [enter(value) for _, value in values]
        with self._random(state, node), self._recording(state, node):
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
        state.recorder.layer = self.graph.shape.nodes[node].layer
        return state.recorder.forwarding(node, node in state.recorder.plan.replayed)

    def start(self, microbatch: int, node: int) -> None:
        """Start an exchange; returns at once. Slices that share it send the sum of their payloads."""
        states, node = self._sharing(microbatch, node)
        communication, state = self._communication(node), states[0]
        taken: list[list[Any]] = [
            [None if each < 0 else x.value(each, node) for each in communication.takes] for x in states
        ]
        route, first = taken[0][0], taken[0][1:]
        with torch.no_grad():
            payload = [reduce(torch.add, column).detach() for column in zip(*[row[1:] for row in taken], strict=True)]
            state.pending[node] = communication.exchange.start(route, *payload)
        wanted = tuple([communication.exchange.differentiable and tensor.requires_grad for tensor in first])
        state.done[node] = ExchangeRecord(route, wanted, ())
        for each in states:
            each.took(communication.takes)

    def ready(self, microbatch: int, node: int) -> bool:
        """Whether `wait` would return without waiting for another rank of this process."""
        (state, *_), node = self._sharing(microbatch, node)
        pending = state.pending if state.recompute is None else {**state.recompute.pending, **state.pending}
        return node not in pending or self._communication(node).exchange.ready(pending[node])

    def wait(self, microbatch: int, node: int) -> None:
        """Wait for an exchange that was started. All slices that share it take what it brought."""
        states, node = self._sharing(microbatch, node)
        communication, first = self._communication(node), states[0]
        received = communication.exchange.finish(first.started(node, "forward"))
        record = first.done[node]
        assert isinstance(record, ExchangeRecord)
        first.done[node] = record._replace(received=tuple((t.shape, t.dtype, t.device) for t in received))
        for state in states:
            for value, element in zip(communication.gives, communication.elements, strict=True):
                wanted = element < len(record.wanted) and record.wanted[element]
                state.values[value] = received[element].detach().requires_grad_(wanted)
            if state.recompute is not None:
                state.recompute.arrived(node, received)

    def outputs(self, microbatch: int) -> Tensors:
        """The tensors of the output boundary, joined and detached. The last stage computes the loss from them."""
        states = [self._state(number) for number in self.numbers(microbatch)]
        first, trains = states[0], torch.is_grad_enabled()
        at_once = self.loss_fn is not None and self.slices == 1
        left = [self._leave(state, at_once=at_once) for state in states]
        joined = self._exit.join([tuple([tensor.detach() for tensor in tensors]) for _, tensors in left])
        if self.loss_fn is not None and (trains or first.target is not None):
            self._form_loss(microbatch, first, left[0][0] if at_once else self._joined(first, joined))
        for state in states:
            if state.kept is not None:
                self._checkpoints.end(state.kept.checkpoint)
                self.kept[state.number] = state.kept
            if state.kept is not None or not trains:
                del self._states[state.number]
        return joined

    def _leave(self, state: MicrobatchState, *, at_once: bool) -> tuple[Any, Tensors]:
        """What a slice gives, and the tensors of the output boundary in it. No output is held: its gradient is all
        that the backward takes. at_once: whether the loss takes what the slice gives."""
        last, trains = len(self.graph.nodes), torch.is_grad_enabled()
        enter = not_held if at_once and trains else own_leaves
        here: dict[int, tuple[Any, Any]] = {value: enter(state.value(value, last)) for value in set(self.graph.leaving)}
        result = fx.node.map_aggregate(self.graph.output, lambda x: here[x.value][0] if isinstance(x, Slot) else x)
        if isinstance(self.module, RecordedStage):
            result = self.module.finished(result)
        tensors = self._exit.part.pack(result)
        if trains and at_once:
            state.leaving = [(value, leaves) for value, (_, leaves) in here.items()]
        elif trains:
            taken = {id(leaf): Taken(leaf) for _, leaves in here.values() for leaf in leaves}
            state.leaving = [(value, tuple([taken[id(x)] for x in leaves])) for value, (_, leaves) in here.items()]
            state.sent = tuple([taken.get(id(t)) if t.requires_grad else None for t in tensors])
        state.took(tuple(here))
        return result, tensors

    def _joined(self, first: MicrobatchState, joined: Tensors) -> Any:
        """What the loss takes where slices are joined. Its gradients collect in the state of the first slice."""
        wanted = self._output.differentiable if torch.is_grad_enabled() else ()
        pairs = [let_go(tensor.detach().requires_grad_(place in wanted)) for place, tensor in enumerate(joined)]
        first.joined = tuple([taken for _, taken in pairs])
        return self._output.unpack([tensor for tensor, _ in pairs])

    def _form_loss(self, microbatch: int, state: MicrobatchState, result: Any) -> None:
        """state: that of the first slice. A forward that runs a second time forms the loss without a graph."""
        assert self.loss_fn is not None
        trains = torch.is_grad_enabled() and state.kept is None
        with self.drawing(state.number, len(self.graph.nodes)), torch.set_grad_enabled(trains):
            loss = check_loss(self._loss_of(self.loss_fn, result, state.target, state.recorder))
        self.losses[microbatch] = loss.detach()
        if trains:
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
            refuse_writing(error, f"stage {self.index}: {segment.name} writes into a value of another segment")
            raise


def _autocast(state: MicrobatchState) -> bool:
    return torch.is_autocast_enabled(state.device.type)
