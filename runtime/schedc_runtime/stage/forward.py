"""The steps of a forward: segments, exchanges, the stage as one node, the outputs, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from schedc.ir.plan import Level
from schedc_runtime.errors import StageError
from schedc_runtime.partition.recorded_stage import RecordedStage
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.random_numbers.numbering import NumberedForward
from schedc_runtime.recompute.whole_stage import save_nothing
from schedc_runtime.segments.graph import Slot
from schedc_runtime.segments.recompute import SegmentRecompute
from schedc_runtime.stage.base import NOTHING, StageBase
from schedc_runtime.stage.engine import edge_of, refuse_writing
from schedc_runtime.stage.hooks import HookMark, hook_mark
from schedc_runtime.stage.in_flight import (
    ExchangeRecord,
    LossEdge,
    MicrobatchState,
    SegmentRecord,
    Tensors,
    WholeRecord,
    cut_off,
    not_held,
    own_leaves,
    own_views,
    tensors_in,
)
from schedc_runtime.stage.offloaded import KeptInputs
from schedc_runtime.stage.taken import Taken, let_go

if TYPE_CHECKING:
    from schedc_runtime.recompute.levels import MicrobatchRecorder


_new_tuple: Any = tuple.__new__
"""Makes a record in C, where its class is not."""


class ForwardSteps(StageBase):
    """The steps of a forward."""

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
        for number, part in zip(self.numbers(microbatch), self._entry.split(inputs), strict=True):
            self._begin(number, part, target, loss_scale, recompute_later)

    def _begin(
        self,
        number: int,
        inputs: Sequence[Tensor],
        target: Any,
        loss_scale: float,
        recompute_later: bool = False,
        *,
        again: bool = False,
    ) -> MicrobatchState:
        """Begin a slice. again: a second time, for an R; nothing of it moves to the host."""
        if number in self._states or number in self.kept:
            raise self._forwarded_again(number)
        graph, memory = (self.graph_with_r, self._memory_with_r) if recompute_later else (self.graph, self._memory)
        trains = torch.is_grad_enabled()
        leaves = tuple(self._detach(inputs) if trains else inputs)
        values = dict(enumerate(self._entry.part.unpack(leaves))) if self.is_cut else {0: leaves}
        self._states[number] = state = MicrobatchState(graph, self.index, number, values, target, loss_scale)
        if trains:
            offload = None if again or self.offload is None else self.offload.begin(number)
            if recompute_later and self.recomputes_whole:
                # Before the seed is drawn: the second run draws it again.
                checkpoint = self._checkpoints.begin(device_holding(leaves))
                state.kept = KeptInputs(tuple(inputs), target, loss_scale, checkpoint)
            elif memory.active or offload is not None:
                state.recorder = memory.recorder(offload)
        if self.is_cut:
            state.uses, state.device = [len(nodes) for nodes in graph.consumers], device_holding(leaves)
            state.pending, state.gradients = {}, {}
            if state.recorder is not None:
                state.recompute = SegmentRecompute(graph, state.recorder)
            if session() is None and self.module.training and self._draws:
                state.seed = int(torch.randint(2**62, (), dtype=torch.int64))
        return state

    def _detach(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs as leaves of this stage's graph. Differentiable inputs require a gradient."""
        leaves = list(map(Tensor.detach, inputs))
        for position in self._input.differentiable:
            leaves[position].requires_grad_()
        return leaves

    def _forwarded_again(self, number: int) -> StageError:
        microbatch = number // self.slices
        return StageError(f"stage {self.index}: microbatch {microbatch} is forwarded again before its backward")

    def run_whole(
        self, number: int, inputs: Sequence[Tensor], target: Any, loss_scale: float, recompute_later: bool
    ) -> Tensors:
        """The forward of a stage of one node, loss included. The backward is then one call of autograd's engine.

        inputs: the tensors of the input boundary, in its shapes. Returns those of the output boundary, detached.
        """
        memory = self._memory_with_r if recompute_later else self._memory
        trains = torch.is_grad_enabled()
        if trains and (
            memory.active or self.offload is not None or (recompute_later and self._memory_with_r.level is Level.NONE)
        ):
            return self.run_recorded(self._begin(number, inputs, target, loss_scale, recompute_later))
        if number in self._whole or number in self.kept:
            raise self._forwarded_again(number)
        began = hook_mark() if self._defers else None
        entered: Any = self._detach(inputs) if trains else inputs
        if self.carries is not None:
            self.carries.begin(number)
        loss = None
        # No context wraps this, nor has the microbatch a state: both would take longer than all else here.
        numbers = None if self.numbering is None else NumberedForward(self.numbering, number)
        try:
            result = own = self._result_of(entered)
            if self.early:
                result, own = result
            if self.loss_fn is not None and (trains or target is not None):
                loss = self._form_loss(number, own, target, loss_scale if trains else None)
        finally:
            if numbers is not None:
                numbers.end()
        outputs = self._output.pack(result)
        if trains:
            self._keep_whole(number, entered, outputs, loss, began)
        return tuple(map(Tensor.detach, outputs))

    def run_recorded(self, state: MicrobatchState) -> Tensors:
        """As `run_whole`, where a recorder says what is held for the backward, or the inputs alone are."""
        began = hook_mark() if self._defers else None
        entering: Tensors = state.values.pop(0)
        leaves: Sequence[Tensor | Taken] = entering
        loss = None
        if self.carries is not None:
            self.carries.begin(state.number)
        with self.drawing(state.number):
            with self._recording(state):
                if state.recorder is not None:
                    pairs = [let_go(tensor) for tensor in entering]
                    entering, leaves = tuple([x for x, _ in pairs]), [taken for _, taken in pairs]
                result = own = self._result_of(entering)
            if self.early:
                result, own = result
            if state.recorder is not None:
                state.recorder.forwarded()
            if self.loss_fn is not None:
                loss = self._form_loss_of(state, own)
        outputs = self._output.pack(result)
        if state.kept is None:
            self._keep_whole(state.number, leaves, outputs, loss, began)
        else:
            self._end_forward(state)
        return tuple([t.detach() for t in outputs])

    def _result_of(self, entering: Sequence[Tensor]) -> Any:
        """What the module of a stage of one node gives. entering: the tensors of the input boundary."""
        try:
            return self.module(*(entering if self._input.flat else self._input.unpack(entering)))
        except RuntimeError as error:
            refuse_writing(error, f"stage {self.index} writes into its input, which belongs to the stage before")
            raise

    def _keep_whole(
        self,
        number: int,
        leaves: Sequence[Tensor | Taken],
        outputs: Tensors,
        loss: LossEdge | None,
        began: HookMark | None,
    ) -> None:
        """Keep what the backward of a stage of one node begins and ends with."""
        if self._input.mixed:
            leaves = [leaves[position] for position in self._input.differentiable]
        if loss is not None and not self.early:
            self._whole[number] = _new_tuple(WholeRecord, (leaves, (loss.edge,), (loss.gradient,), began))
            return
        if self._output.mixed:
            outputs = tuple([outputs[position] for position in self._output.differentiable])
        edges, gradients = tuple(map(edge_of, outputs)), None
        if loss is not None:
            edges, gradients = (loss.edge, *edges), (loss.gradient,)
        self._whole[number] = _new_tuple(WholeRecord, (leaves, edges, gradients, began))

    def _end_forward(self, state: MicrobatchState) -> None:
        """End the forward of a slice that holds its inputs alone, or nothing where gradients are off."""
        if state.kept is not None:
            self._checkpoints.end(state.kept.checkpoint)
            self.kept[state.number] = state.kept
        if state.kept is not None or not torch.is_grad_enabled():
            del self._states[state.number]

    def run(self, microbatch: int, node: int) -> None:
        """The forward of a segment."""
        number, node = self._at(microbatch, node)
        state, segment, began = self._state(number), self._segment(node), hook_mark() if self._defers else None
        if self.carries is not None:
            self.carries.begin(number)
        values = [(value, state.value(value, node)) for value in segment.takes]
        lets_go = state.recorder or (segment.joins and self.captures is None)
        enter = not_held if lets_go else own_views if _autocast(state) else own_leaves
        taken: list[tuple[Any, Any]] = [enter(value) for _, value in values]
        with self._random(state, node), self._recording(state, node):
            inputs = [value for value, _ in taken]
            results = self._replayed(state, node, inputs) or self._called(state, node, inputs)
        if state.recompute is not None:
            state.recompute.forwarded(node, values)
        if torch.is_grad_enabled() and state.kept is None:
            edges = tuple([tuple(map(edge_of, tensors_in(value))) for value in results])
            state.done[node] = SegmentRecord(tuple([leaves for _, leaves in taken]), edges, began)
        state.values |= {value: cut_off(result) for value, result in zip(segment.gives, results, strict=True)}
        state.took(segment.takes)

    def _recording(self, state: MicrobatchState, node: int = -1) -> AbstractContextManager[None]:
        """Decides what autograd saves of a node; -1: of a stage of one node."""
        if state.kept is not None:
            return save_nothing()
        if state.recorder is None:
            return NOTHING
        if node >= 0:
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
        for each, values in zip(states, taken, strict=True):
            each.took_to_send(node, communication.takes, values)

    def ready(self, microbatch: int, node: int) -> bool:
        """Whether `wait` would return without waiting for another rank of this process."""
        if (returned := self._returned(microbatch, node)) is not None:
            return self._communication(self._place[node][0]).exchange.ready(returned)
        (state, *_), node = self._sharing(microbatch, node)
        pending = state.pending if state.recompute is None else {**state.recompute.pending, **state.pending}
        return node not in pending or self._communication(node).exchange.ready(pending[node])

    def _returned(self, microbatch: int, node: int) -> Any:
        """The exchange in flight in which a node of `shape` returns gradients; None without one."""
        return self._returning.get(microbatch * self.slices, {}).get(self._place[node][0], (None, None))[1]

    def wait(self, microbatch: int, node: int) -> None:
        """Wait for an exchange that was started. All slices that share it take what it brought."""
        states, node = self._sharing(microbatch, node)
        communication, first = self._communication(node), states[0]
        received = communication.exchange.finish(first.started(node, "forward"))
        record = first.done[node]
        assert isinstance(record, ExchangeRecord)
        if communication.exchange.returns and torch.is_grad_enabled():
            self._returning.setdefault(first.number, {})[node] = (record.route, None)
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
        first = states[0]
        at_once = self.loss_fn is not None and self.slices == 1
        left = [self._leave(state, at_once=at_once) for state in states]
        joined = self._exit.join([tuple([tensor.detach() for tensor in tensors]) for _, tensors in left])
        if self.loss_fn is not None and (torch.is_grad_enabled() or first.target is not None):
            result = left[0][0] if at_once else self._joined(first, joined)
            if self.early:
                result = result.output
            with self.drawing(first.number, len(self.graph.nodes)):
                if (loss := self._form_loss_of(first, result)) is not None:
                    first.loss, first.loss_gradient = loss
        for state in states:
            self._end_forward(state)
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
        tensors = self._exit.part.pack(result.passed if self.early else result)
        if trains and at_once:
            state.leaving = [(value, leaves) for value, (_, leaves) in here.items()]
            if self.early:
                entered = {
                    id(tensor): its
                    for inside, leaves in here.values()
                    for tensor, its in zip(tensors_in(inside), leaves, strict=True)
                }
                state.sent = tuple([entered.get(id(t)) if t.requires_grad else None for t in tensors])
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

    def _form_loss_of(self, state: MicrobatchState, result: Any) -> LossEdge | None:
        """state: that of the first slice. A forward that runs a second time forms the loss without a graph."""
        scale = state.loss_scale if torch.is_grad_enabled() and state.kept is None else None
        return self._form_loss(state.number // self.slices, result, state.target, scale, state.recorder)

    def _form_loss(
        self, microbatch: int, result: Any, target: Any, scale: float | None, recorder: MicrobatchRecorder | None = None
    ) -> LossEdge | None:
        """Form the loss of a microbatch. scale: that of its gradient; None: without a graph."""
        assert self.loss_fn is not None
        trains, before = scale is not None, torch.is_grad_enabled()
        torch._C._set_grad_enabled(
            trains
        )  # a loss may add gradients at once; torch's context takes three times as long
        try:
            loss = check_loss(self._loss_of(self.loss_fn, result, target, recorder))
        finally:
            torch._C._set_grad_enabled(before)
        self.losses[microbatch] = loss.detach()
        return None if scale is None else LossEdge(edge_of(loss), self._loss_gradient(loss, scale))

    def _loss_gradient(self, loss: Tensor, scale: float) -> Tensor:
        """[] ``scale`` as the gradient of the loss: the bits that the backward of ``loss * scale`` begins with."""
        last = self._last_gradient
        kind = (scale, loss.dtype, loss.device, type(loss))
        if last is None or last[0] != kind:
            last = self._last_gradient = (kind, torch.full_like(loss, scale))
        return last[1]

    def _replayed(self, state: MicrobatchState, node: int, taken: Sequence[Any]) -> tuple[Any, ...] | None:
        """What a captured segment gives; None where it is launched as ever."""
        if self.captures is None or not torch.is_grad_enabled():
            return None
        obstacle = "autocast" if _autocast(state) else ""
        if state.recorder is not None or state.kept is not None:
            obstacle = "its stage recomputes, or moves activations to the host"
        return self.captures.run(self.graph, self.module, node, taken, obstacle)

    def _called(self, state: MicrobatchState, node: int, taken: Sequence[Any]) -> tuple[Any, ...]:
        segment = self._segment(node)
        run = segment.run if state.recorder is None else partial(state.recorder.run_segment, node, segment.run)
        try:
            return run(self.module, *taken)
        except RuntimeError as error:
            refuse_writing(error, f"stage {self.index}: {segment.name} writes into a value of another segment")
            raise


def _autocast(state: MicrobatchState) -> bool:
    return torch.is_autocast_enabled(state.device.type)


def device_holding(tensors: Sequence[Tensor]) -> torch.device:
    """The device of ``tensors``, of any shape; the CPU if the sequence is empty."""
    return tensors[0].device if tensors else torch.device("cpu")


def check_loss(loss: Any) -> Tensor:
    """The loss, a scalar; raises `StageError` where a loss function returned anything else."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise StageError(f"loss_fn returned {shown}", "return a scalar tensor: the mean over one microbatch")
    return loss
