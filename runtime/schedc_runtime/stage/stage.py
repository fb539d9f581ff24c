"""One stage of the model: the forward, input gradient and weight gradient of one microbatch. It never decides when.

    forward(m)                F    keeps what the backward of m needs
    backward(m, defer=False)  B    frees it, weight gradients included
    backward(m, defer=True)   I    frees the graph, keeps the weight work of m
    weight(m)                 W    runs that work
    forward(m,                F    keeps its inputs, or what the level of recomputation keeps
        recompute_later=True)
    recompute(m)              R    recomputes the rest of what the backward of m needs

Every stage is detached from its neighbours: its inputs are detached leaves, and it returns detached outputs.

A stage is a graph of nodes. A stage that is not cut has one node, and each op is one call. A stage that is cut at its
exchanges runs node by node, in any legal order. Its ops run the serial order (`schedc.cell.serial`):

    forward                          backward                              weight gradients
    begin(m, inputs)                 begin_backward(m, gradients)
    run(m, node)     a segment       run_backward(m, node)                 run_weight(m, node)
    start(m, node)   an exchange     start_backward(m, node)
    wait(m, node)                    wait_backward(m, node)
    outputs(m)                       input_gradients(m), end_backward(m)

Every segment is detached from the others: its inputs are its own leaves, and it has its own backward. Three rules make
every legal order of the steps give the same bits:

* The gradients of a value that several segments use are summed in ascending order of the segments.
* The weight gradients of a parameter that several segments use are added in one order.
* Every segment draws its own random numbers.

A microbatch may run as slices of its rows (`schedc.cell.slices`). `begin` splits the inputs and `outputs` joins the
outputs; gradients are split and joined in the same places. Boundaries, messages and the loss are those of the whole
microbatch. Each slice has a state of its own under its number (`numbers`), by which it draws random numbers. All slices
of a microbatch move to the host together, in one copy.

Where something is recomputed, `again` runs nodes a second time before their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from schedc.cell.graph import StageShape
from schedc.cell.program import Action, Half
from schedc.cell.serial import serial
from schedc.cell.slices import sliced
from schedc_runtime.errors import StageError
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.stage.backward import BackwardSteps
from schedc_runtime.stage.forward import ForwardSteps
from schedc_runtime.stage.in_flight import Tensors
from schedc_runtime.stage.written_whole import (
    StageCalls,
    WholeForm,
    WrittenWhole,
    begin_run,
    lines_of_stage,
    unhooked_code,
)


class Stage(ForwardSteps, BackwardSteps):
    """A stage module with the state of the microbatches in flight.

    module: takes the values of boundary ``index`` and returns those of boundary ``index + 1`` (see `StageModules`).
    index, stages: this stage's number, and the number of stages. blocks: paths of the model's blocks in the module. A
    block without an exchange is one segment. loss_fn: loss of the last stage. Without one the last stage returns its
    output like any other. early: whether ``loss_fn`` is that of an output which this stage has and the last has not.
    inputs: number of values that enter a stage which is cut at its exchanges; None for a stage of one node.
    slices: number of slices of its rows in which a cut stage runs a microbatch.
    in_order: whether the Ws come in the order of the Is, on a stage of one node. What I computes of parameters is then
    held by nobody.

    Call `bind` with the boundaries of the current input signature before `forward`.
    """

    _written: WrittenWhole | None = None
    """The lines of the last run."""

    # Recompute nodes for the backward. A node whose outputs are held does nothing.

    def begin_recompute(self, microbatch: int) -> None:
        """Begin an R. If the whole stage runs a second time, its steps are those of a forward."""
        for number in self.numbers(microbatch):
            if (kept := self._pop_kept(number)) is not None:
                inputs, target, loss_scale, checkpoint = kept
                with checkpoint.restored():
                    state = self._begin(number, inputs, target, loss_scale, again=True)
                    if self.is_cut:
                        state.checkpoint = checkpoint
                    else:
                        self.run_recorded(state)
            state = self._state(number)
            state.recomputed = True
            if state.recorder is not None and state.checkpoint is None:
                state.recorder.forwarded()

    def recompute_rest(self, microbatch: int) -> None:
        """Recompute the regions of every node that the cell program does not recompute step by step."""
        for number in self.numbers(microbatch):
            state = self._state(number)
            if state.recorder is not None and state.checkpoint is None:
                state.recorder.fill_all(but=state.graph.recomputed)

    def end_recompute(self, microbatch: int) -> None:
        """End an R."""
        states = [self._state(number) for number in self.numbers(microbatch)]
        if (checkpoint := states[0].checkpoint) is None:
            return
        with checkpoint.restored():
            self.outputs(microbatch)
        for state in states:
            state.checkpoint = None

    def again(self, action: Action, microbatch: int, node: int) -> None:
        """Run, start or wait for a node a second time: for its backward, or for what is to be sent."""
        number, own = self._at(microbatch, node)
        state = self._state(number)
        if state.checkpoint is not None:
            with state.checkpoint.restored() if action is Action.RUN else nullcontext():
                self.method(action, Half.FORWARD)(microbatch, node)
        elif state.recompute is None or own not in state.graph.recomputed:
            raise StageError(f"stage {self.index}: {self.graph.nodes[own].name} is not recomputed")
        elif action is Action.RUN:
            state.recompute.run(self.module, own, self._random(state, own))
        elif action is Action.START:
            state.recompute.start(own)
        else:
            state.recompute.wait(own)

    def method(self, action: Action, half: Half) -> Callable[[int, int], None]:
        """What does a micro-step, given the microbatch and the node of `shape`."""
        if half is Half.RECOMPUTE:
            return partial(self.again, action)
        method: Callable[[int, int], None] = getattr(self, action if half is Half.FORWARD else f"{action}_{half}")
        return method

    # All steps of an op, in serial order.

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        target: Any = None,
        loss_scale: float = 1.0,
        *,
        recompute_later: bool = False,
    ) -> Tensors:
        """F: the tensors of the output boundary, detached. They may be sent, but must not be written to.

        inputs: the tensors of the input boundary, in order. They are held until the backward, and not written to.
        target: second argument of ``loss_fn``, on the last stage. loss_scale: factor of the loss that is
        differentiated, 1 / microbatches for a mean; `losses` keeps the loss without it.
        recompute_later: `recompute` will run before the backward.
        With gradients off (evaluation) nothing is held.
        """
        if not self.is_cut:
            return self.run_whole(microbatch, inputs, target, loss_scale, recompute_later)
        self.begin(microbatch, inputs, target, loss_scale, recompute_later=recompute_later)
        self._serially(microbatch, "F", self.shape, None)
        return self.outputs(microbatch)

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None] = (), *, defer: bool = False) -> Tensors:
        """B, or I with ``defer``: the gradient of each differentiable input, zeros where no output depends on it.

        output_grads: one per differentiable output (`Boundary.gradients`), of its shape; None is zero. Empty on a last
        stage that forms a loss. They are not written to. The microbatch's graph is freed.
        """
        if not self.is_cut:
            return self.run_whole_backward(microbatch, output_grads, defer=defer)
        self.begin_backward(microbatch, output_grads)
        state = self._state(self.numbers(microbatch)[0])
        shape = state.graph.shape.ready if state.recomputed else state.graph.shape
        self._serially(microbatch, "I", None, sliced(shape, self.slices))
        gradients = self.input_gradients(microbatch)
        self.end_backward(microbatch)
        if not defer:
            self.weight(microbatch)
        return gradients

    def calls_of_run(self) -> StageCalls:
        """F without a later R, and B, for one run of a stream: what all its microbatches have alike is looked up once.

        A stage of one node has lines written for it, unless gradients are off, something else takes part in its ops, or
        it forms an early loss.
        """
        others = (
            self.is_cut or self.early or self._memory.active or self.offload is not None or self.carries is not None
        )
        own = type(self).forward is _FORWARD and type(self).backward is _BACKWARD and not self.__dict__.keys() & _OPS
        if others or not own or not torch.is_grad_enabled():
            return StageCalls(self.forward, self.backward)
        numbering = None if session() is None else self.numbering
        draws = numbering is not None and numbering.draws
        code = None if draws else unhooked_code(self.module)  # the names of draws are looked up by modules' calls
        form = WholeForm(self._input, self._output, code, self.loss_fn, numbering, draws, self._defers)
        if self._written is None or not form.same(self._written.form):
            self._written = lines_of_stage(self, form)
        return begin_run(self, self._written)

    def recompute(self, microbatch: int) -> None:
        """R: recompute what the forward of ``microbatch`` with ``recompute_later`` did not hold for the backward."""
        self.begin_recompute(microbatch)
        if self.is_cut:
            self._serially(microbatch, "R", None, self.shape_with_r)
        self.recompute_rest(microbatch)
        self.end_recompute(microbatch)

    def weight(self, microbatch: int) -> None:
        """W: compute the deferred weight gradients of ``microbatch`` and add them to ``parameter.grad``."""
        if self.is_cut:
            self._serially(microbatch, "W", None, self.shape)
        elif microbatch in self._split.pending:
            self._split.weight(microbatch)
        else:
            raise StageError(f"stage {self.index}: microbatch {microbatch} has no deferred weight gradients")

    def _serially(self, microbatch: int, kind: str, forward: StageShape | None, backward: StageShape | None) -> None:
        for action, half, node in serial(kind, forward, backward).steps:
            self.method(action, half)(microbatch, node)


_FORWARD, _BACKWARD, _OPS = Stage.forward, Stage.backward, {"forward", "backward"}
"""The ops as they stand here, which a trainer's own stage may replace."""
