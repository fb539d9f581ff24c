"""A stage that runs segment by segment: the micro-steps of each microbatch, in any legal order.

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

from torch import Tensor

from schedc.cell.program import Action, CellProgram, Half
from schedc.cell.serial import serial
from schedc.cell.slices import sliced
from schedc_runtime.errors import StageError
from schedc_runtime.segments.backward import BackwardSteps
from schedc_runtime.segments.forward import ForwardSteps
from schedc_runtime.segments.in_flight import Tensors


class SegmentedStage(ForwardSteps, BackwardSteps):
    """A `Stage` that can also run in micro-steps, on the nodes of `shape`. Its ops run them in serial order.

    inputs: number of values that enter the stage module. blocks: paths of the model's blocks in it. A block without an
    exchange is one segment. slices: number of slices of its rows in which it runs a microbatch.
    """

    # Recompute nodes for the backward. A node whose outputs are held does nothing.

    def begin_recompute(self, microbatch: int) -> None:
        """Begin an R. If the whole stage runs a second time, its steps are those of a forward."""
        for number in self.numbers(microbatch):
            if (kept := self._pop_kept(number)) is not None:
                inputs, target, loss_scale, checkpoint = kept
                with checkpoint.restored():
                    self._begin(number, inputs, target, loss_scale)
                self._state(number).checkpoint = checkpoint
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

    # All micro-steps of an op, in serial order.

    def forward(self, microbatch: int, inputs: Sequence[Tensor], *loss: Any, **options: Any) -> Tensors:
        self.begin(microbatch, inputs, *loss, **options)
        self._serially(microbatch, serial("F", self.shape, None))
        return self.outputs(microbatch)

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None] = (), *, defer: bool = False) -> Tensors:
        self.begin_backward(microbatch, output_grads)
        state = self._state(self.numbers(microbatch)[0])
        shape = state.graph.shape.ready if state.recomputed else state.graph.shape
        self._serially(microbatch, serial("I", None, sliced(shape, self.slices)))
        gradients = self.input_gradients(microbatch)
        self.end_backward(microbatch)
        if not defer:
            self.weight(microbatch)
        return gradients

    def recompute(self, microbatch: int) -> None:
        self.begin_recompute(microbatch)
        self._serially(microbatch, serial("R", None, self.shape_with_r))
        self.recompute_rest(microbatch)
        self.end_recompute(microbatch)

    def weight(self, microbatch: int) -> None:
        self._serially(microbatch, serial("W", None, self.shape))

    def _serially(self, microbatch: int, program: CellProgram) -> None:
        for action, half, node in program.steps:
            self.method(action, half)(microbatch, node)
