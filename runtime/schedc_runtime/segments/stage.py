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

Where something is recomputed, `run_recompute`, `start_recompute` and `wait_recompute` run nodes a second time before
their backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from schedc.cell.graph import StageShape
from schedc_runtime.errors import StageError
from schedc_runtime.segments.backward import BackwardSteps
from schedc_runtime.segments.forward import ForwardSteps
from schedc_runtime.segments.graph import Segment
from schedc_runtime.segments.in_flight import MicrobatchState, Tensors
from schedc_runtime.segments.recompute import SegmentRecompute


class SegmentedStage(ForwardSteps, BackwardSteps):
    """A `Stage` that can also run in micro-steps. Its `forward`, `backward` and `weight` run them in serial order.

    inputs: number of values that enter the stage module. blocks: paths of the model's blocks in it. A block without an
    exchange is one segment.
    """

    # Recompute nodes for the backward. A node whose outputs are held does nothing.

    def begin_recompute(self, microbatch: int) -> None:
        """Begin an R. If the whole stage runs a second time, its steps are those of a forward."""
        if (kept := self._pop_kept(microbatch)) is not None:
            inputs, target, loss_scale, checkpoint = kept
            with checkpoint.restored():
                self.begin(microbatch, inputs, target, loss_scale)
            self._state(microbatch).checkpoint = checkpoint
        state = self._state(microbatch)
        state.recomputed = True
        if state.recorder is not None and state.checkpoint is None:
            state.recorder.forwarded()

    def recompute_rest(self, microbatch: int) -> None:
        """Recompute the regions of every node that the cell program does not recompute step by step."""
        state = self._state(microbatch)
        if state.recorder is not None and state.checkpoint is None:
            state.recorder.fill_all(but=state.graph.recomputed)

    def end_recompute(self, microbatch: int) -> None:
        """End an R."""
        state = self._state(microbatch)
        if state.checkpoint is None:
            return
        with state.checkpoint.restored():
            self.outputs(microbatch)
        state.checkpoint = None

    def run_recompute(self, microbatch: int, node: int) -> None:
        """Run the forward of a segment a second time: for its backward, or for what is to be sent."""
        state = self._state(microbatch)
        if state.checkpoint is None:
            self._recomputing(state, node).run(self.module, node, self._random(microbatch, state, node))
            return
        with state.checkpoint.restored():
            self.run(microbatch, node)

    def start_recompute(self, microbatch: int, node: int) -> None:
        """Start sending a second time what an exchange brought."""
        state = self._state(microbatch)
        if state.checkpoint is None:
            self._recomputing(state, node).start(node)
        else:
            self.start(microbatch, node)

    def ready_recompute(self, microbatch: int, node: int) -> bool:
        state = self._state(microbatch)
        return self._recomputing(state, node).ready(node) if state.checkpoint is None else self.ready(microbatch, node)

    def wait_recompute(self, microbatch: int, node: int) -> None:
        """Wait for what is sent a second time."""
        state = self._state(microbatch)
        if state.checkpoint is None:
            self._recomputing(state, node).wait(node)
        else:
            self.wait(microbatch, node)

    def _recomputing(self, state: MicrobatchState, node: int) -> SegmentRecompute:
        if state.recompute is None or node not in state.graph.recomputed:
            raise StageError(f"stage {self.index}: {self.graph.nodes[node].name} is not recomputed")
        return state.recompute

    # All micro-steps of an op, in serial order.

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        target: Any = None,
        loss_scale: float = 1.0,
        *,
        recompute_later: bool = False,
    ) -> Tensors:
        self.begin(microbatch, inputs, target, loss_scale, recompute_later=recompute_later)
        for node, step in enumerate(self.graph.nodes):
            if isinstance(step, Segment):
                self.run(microbatch, node)
            else:
                self.start(microbatch, node)
                self.wait(microbatch, node)
        return self.outputs(microbatch)

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None] = (), *, defer: bool = False) -> Tensors:
        self.begin_backward(microbatch, output_grads)
        if not (state := self._state(microbatch)).recomputed:
            self._recompute_nodes(microbatch, state.graph.shape)
        for node in reversed(range(len(self.graph.nodes))):
            if isinstance(self.graph.nodes[node], Segment):
                self.run_backward(microbatch, node)
            else:
                self.start_backward(microbatch, node)
                self.wait_backward(microbatch, node)
        gradients = self.input_gradients(microbatch)
        self.end_backward(microbatch)
        if not defer:
            self.weight(microbatch)
        return gradients

    def recompute(self, microbatch: int) -> None:
        self.begin_recompute(microbatch)
        self._recompute_nodes(microbatch, self.graph_with_r.shape)
        self.recompute_rest(microbatch)
        self.end_recompute(microbatch)

    def _recompute_nodes(self, microbatch: int, shape: StageShape) -> None:
        for node in shape.recomputed:
            if isinstance(self.graph.nodes[node], Segment):
                self.run_recompute(microbatch, node)
            else:
                self.start_recompute(microbatch, node)
                self.wait_recompute(microbatch, node)

    def weight(self, microbatch: int) -> None:
        for node in reversed(self.shape.weights):
            self.run_weight(microbatch, node)
