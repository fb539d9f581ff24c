"""A stage that runs each microbatch as slices of its rows: each slice is a microbatch in flight of its own.

    begin      the inputs are split             outputs           the outputs are joined; the loss is that of all rows
    run, start and wait of a node: of one slice, or, where all slices share an exchange, of all of them
    begin_backward   gradients are split        input_gradients   gradients of the inputs are joined

Boundaries, messages and the loss are those of the whole microbatch. Slice s of microbatch m has the number m * k + s,
by which it draws its random numbers. Weight gradients are added in the order of slices. All slices of a microbatch move
to the host together, in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from schedc.cell.graph import StageShape
from schedc.cell.slices import JOINT, sliced
from schedc.ir.plan import Recompute
from schedc_runtime.errors import StageError
from schedc_runtime.offload.microbatch import MicrobatchOffload
from schedc_runtime.offload.rules import OffloadSettings
from schedc_runtime.offload.stage_offload import StageOffload
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.partition.sliced_boundary import SlicedBoundary
from schedc_runtime.random_numbers.numbering import Numbering
from schedc_runtime.recompute.levels import MicrobatchRecorder, Recomputation
from schedc_runtime.segments.captured import CapturedSegments
from schedc_runtime.segments.graph import StageGraph
from schedc_runtime.segments.stage import SegmentedStage
from schedc_runtime.stage.engine import differentiate, edge_of
from schedc_runtime.stage.stage import FuseSegment, LossFunction, Stage, check_loss
from schedc_runtime.stage.taken import Taken, let_go

Tensors = tuple[Tensor, ...]


class _Loss(NamedTuple):
    """The loss of a microbatch. outputs: what collects the gradients of the joined outputs. edge: where its own enters.

    recorder: what it has saved, where that may move to the host.
    """

    outputs: tuple[Taken, ...]
    edge: GradientEdge | None
    gradient: Tensor
    recorder: MicrobatchRecorder | None


class SlicedStage(Stage):
    """A `SegmentedStage` in slices. Its nodes are those of `schedc.cell.slices.sliced`.

    flights: the stage that runs each slice as a microbatch of its own; it forms no loss. slices: their number.
    """

    def __init__(self, flights: SegmentedStage, slices: int, loss_fn: LossFunction | None) -> None:
        self.flights, self.slices = flights, slices
        super().__init__(flights.module, flights.index, flights.stages, blocks=flights.blocks, loss_fn=loss_fn)
        self._targets: dict[int, tuple[Any, float]] = {}
        self._losses: dict[int, _Loss] = {}
        self._joint: dict[tuple[int, int], Any] = {}
        """Exchanges in flight that all slices share, by microbatch and node."""
        self._place: list[tuple[int, int]] = []
        """By node: the node of ``flights``, and the slice; -1 for one that all slices share."""
        for number, node in enumerate(flights.shape.nodes):
            self._place += [(number, -1)] if node.role in JOINT else [(number, own) for own in range(slices)]

    # What is known of it.

    @property
    def numbering(self) -> Numbering | None:
        return self.flights.numbering

    @numbering.setter
    def numbering(self, numbering: Numbering | None) -> None:
        self.flights.numbering = numbering

    @property
    def captures(self) -> CapturedSegments | None:
        """As of a `SegmentedStage`."""
        return self.flights.captures

    @captures.setter
    def captures(self, captures: CapturedSegments | None) -> None:
        self.flights.captures = captures

    @property
    def graph(self) -> StageGraph:
        """The graph of one slice."""
        return self.flights.graph

    @property
    def shape(self) -> StageShape:
        """The graph of a microbatch, for the compiler."""
        return sliced(self.flights.shape, self.slices)

    @property
    def shape_with_r(self) -> StageShape:
        """The graph of microbatches with an R."""
        return sliced(self.flights.shape_with_r, self.slices)

    @property
    def in_flight(self) -> tuple[int, ...]:
        return tuple(sorted({number // self.slices for number in self.flights.in_flight}))

    @property
    def pending(self) -> tuple[int, ...]:
        return tuple(sorted({number // self.slices for number in self.flights.pending}))

    @property
    def recomputes_whole(self) -> bool:
        return self.flights.recomputes_whole

    @property
    def recomputation(self) -> Recomputation:
        return self.flights.recomputation

    def numbers(self, microbatch: int) -> range:
        """The numbers of the slices of a microbatch."""
        return range(microbatch * self.slices, (microbatch + 1) * self.slices)

    def set_recomputation(self, plan: Recompute, *, count: bool = False) -> None:
        self.flights.set_recomputation(plan, count=count)

    def fuse_segments(self, fuse: FuseSegment | None) -> None:
        self.flights.fuse_segments(fuse)

    def prepare_recompute(self) -> None:
        self.flights.prepare_recompute()

    @property
    def offload(self) -> StageOffload | None:
        """What moves to the host between forward and backward; None if nothing does."""
        return self.flights.offload

    @offload.setter
    def offload(self, offload: StageOffload | None) -> None:
        self.flights.offload = offload

    def set_offload(self, offload: OffloadSettings | None) -> None:
        self.flights.set_offload(offload and replace(offload, slices=self.slices))

    def box_inputs(self, microbatch: int, boxes: MicrobatchOffload) -> None:
        for number in self.numbers(microbatch):
            self.flights.box_inputs(number, boxes)

    def _offloaded(self, microbatch: int) -> MicrobatchOffload:
        return self.flights._offloaded(self.numbers(microbatch)[0])

    def follow(self) -> None:
        """As of a `SegmentedStage`."""
        self.flights.follow()

    def bind_slices(self, input: Boundary, output: Boundary, part_input: Boundary, part_output: Boundary) -> None:
        """`bind` with the boundaries of a whole microbatch, and of one of its slices."""
        super().bind(input, output)
        self.flights.bind(part_input, part_output)
        self._entry = SlicedBoundary.of(input, part_input, self.slices)
        self._exit = SlicedBoundary.of(output, part_output, self.slices)

    def end_step(self) -> None:
        self.flights.end_step()

    def reset(self) -> None:
        super().reset()
        self.flights.reset()
        for table in (self._targets, self._losses, self._joint):
            table.clear()

    def release(self) -> None:
        self.reset()
        self.flights.release()

    # The micro-steps of a forward.

    def begin(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        target: Any = None,
        loss_scale: float = 1.0,
        *,
        recompute_later: bool = False,
    ) -> None:
        """Take the tensors of the input boundary, in its shapes, split into slices."""
        for number, part in zip(self.numbers(microbatch), self._entry.split(inputs), strict=True):
            self.flights.begin(number, part, None, loss_scale, recompute_later=recompute_later)
        if self.loss_fn is not None:
            self._targets[microbatch] = target, loss_scale

    def run(self, microbatch: int, node: int) -> None:
        """The forward of a segment of one slice."""
        self.flights.run(*self._at(microbatch, node))

    def start(self, microbatch: int, node: int) -> None:
        """Start an exchange of one slice, or one of all of them."""
        own, part = self._place[node]
        if part < 0:
            self._joint[microbatch, own] = self.flights.start_together(self.numbers(microbatch), own)
        else:
            self.flights.start(*self._at(microbatch, node))

    def ready(self, microbatch: int, node: int) -> bool:
        """Whether a wait would return without waiting for another rank of this process."""
        own, part = self._place[node]
        if part >= 0:
            return self.flights.ready(*self._at(microbatch, node))
        pending = self._joint.get((microbatch, own))
        return pending is None or self.flights.ready_together(own, pending)

    def wait(self, microbatch: int, node: int) -> None:
        """Wait for an exchange that was started."""
        own, part = self._place[node]
        if part < 0:
            self.flights.wait_together(self.numbers(microbatch), own, self._joint.pop((microbatch, own)))
        else:
            self.flights.wait(*self._at(microbatch, node))

    def outputs(self, microbatch: int) -> Tensors:
        """The tensors of the output boundary, joined. The last stage computes the loss of all rows from them."""
        joined = self._exit.join([self.flights.outputs(number) for number in self.numbers(microbatch)])
        if self.loss_fn is not None:
            target, scale = self._targets.pop(microbatch)
            if torch.is_grad_enabled() or target is not None:
                self._form_loss(microbatch, joined, target, scale)
        return joined

    def _form_loss(self, microbatch: int, joined: Tensors, target: Any, scale: float) -> None:
        assert self.loss_fn is not None
        wanted, first = torch.is_grad_enabled(), self.numbers(microbatch)[0]
        positions = self._output.differentiable
        pairs = [let_go(x.detach().requires_grad_(wanted and place in positions)) for place, x in enumerate(joined)]
        recorder = self._loss_recorder(first) if wanted else None
        with self.drawing(first, len(self.flights.graph.nodes)):
            result = self._output.unpack([x for x, _ in pairs])
            loss = check_loss(self._loss_of(self.loss_fn, result, target, recorder))
        self.losses[microbatch] = loss.detach()
        if wanted:
            taken = tuple([each for _, each in pairs])
            self._losses[microbatch] = _Loss(taken, edge_of(loss), self._loss_gradient(loss, scale), recorder)

    def loss_recorder(self, microbatch: int) -> MicrobatchRecorder | None:
        """What the loss of a microbatch in flight has saved; None where it does not move to the host."""
        return loss.recorder if (loss := self._losses.get(microbatch)) is not None else None

    def _loss_recorder(self, number: int) -> MicrobatchRecorder | None:
        """Records what the loss saves, where the microbatch moves to the host."""
        if self.offload is None or (boxes := self.offload.moving(number)) is None:
            return None
        recorder = MicrobatchRecorder(self.recomputation)
        recorder.offload = boxes
        return recorder

    # The micro-steps of a backward.

    def begin_backward(self, microbatch: int, gradients: Sequence[Tensor | None] = ()) -> None:
        """Take the gradients of the differentiable outputs, in their shapes, split into slices."""
        if self.offload is not None:
            self.offload.check_here(self.numbers(microbatch)[0], "the backward")
        if self.loss_fn is not None:
            gradients = self._loss_gradients(microbatch)
        if len(gradients) != len(self._output.differentiable):
            raise StageError(
                f"stage {self.index}: {len(gradients)} output gradients for {len(self._output.differentiable)} outputs"
            )
        for number, part in zip(self.numbers(microbatch), self._exit.split_gradients(gradients), strict=True):
            self.flights.begin_backward(number, part)

    def _loss_gradients(self, microbatch: int) -> list[Tensor | None]:
        if (loss := self._losses.pop(microbatch, None)) is None:
            raise StageError(f"stage {self.index}: microbatch {microbatch} has not been forwarded")
        if loss.edge is not None:
            differentiate((loss.edge,), (loss.gradient,))
        return [loss.outputs[position].grad for position in self._output.differentiable]

    def run_backward(self, microbatch: int, node: int) -> None:
        """The input gradients of a segment of one slice."""
        self.flights.run_backward(*self._at(microbatch, node))

    def start_backward(self, microbatch: int, node: int) -> None:
        """Start sending back the gradients of an exchange."""
        self.flights.start_backward(*self._at(microbatch, node))

    def wait_backward(self, microbatch: int, node: int) -> None:
        """Wait for the gradients that an exchange sends back."""
        self.flights.wait_backward(*self._at(microbatch, node))

    def input_gradients(self, microbatch: int) -> Tensors:
        """The gradient of each differentiable input, joined."""
        return self._entry.join_gradients([self.flights.input_gradients(m) for m in self.numbers(microbatch)])

    def end_backward(self, microbatch: int) -> None:
        """Forget a microbatch whose backward steps have all run."""
        self._each(self.flights.end_backward, microbatch)

    def run_weight(self, microbatch: int, node: int) -> None:
        """Add the weight gradients of a segment of one slice."""
        self.flights.run_weight(*self._at(microbatch, node))

    # Recompute nodes for the backward.

    def begin_recompute(self, microbatch: int) -> None:
        """Begin an R."""
        self._each(self.flights.begin_recompute, microbatch)

    def recompute_rest(self, microbatch: int) -> None:
        """Recompute what the cell program does not recompute step by step."""
        self._each(self.flights.recompute_rest, microbatch)

    def end_recompute(self, microbatch: int) -> None:
        """End an R. The loss of the microbatch was kept."""
        self._each(self.flights.end_recompute, microbatch)

    def run_recompute(self, microbatch: int, node: int) -> None:
        """Run the forward of a segment of one slice a second time."""
        self.flights.run_recompute(*self._at(microbatch, node))

    def start_recompute(self, microbatch: int, node: int) -> None:
        """Start sending a second time what an exchange brought."""
        self.flights.start_recompute(*self._at(microbatch, node))

    def ready_recompute(self, microbatch: int, node: int) -> bool:
        return self.flights.ready_recompute(*self._at(microbatch, node))

    def wait_recompute(self, microbatch: int, node: int) -> None:
        """Wait for what is sent a second time."""
        self.flights.wait_recompute(*self._at(microbatch, node))

    def _at(self, microbatch: int, node: int) -> tuple[int, int]:
        """The number of the slice of a node, and its node in ``flights``."""
        own, part = self._place[node]
        if part < 0:
            raise StageError(f"stage {self.index}: {self.flights.graph.nodes[own].name} is shared by all slices")
        return microbatch * self.slices + part, own

    def _each(self, act: Callable[[int], None], microbatch: int) -> None:
        for number in self.numbers(microbatch):
            act(number)

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
        for node, step in enumerate(self.shape.nodes):
            if step.exchange:
                self.start(microbatch, node)
                self.wait(microbatch, node)
            else:
                self.run(microbatch, node)
        return self.outputs(microbatch)

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None] = (), *, defer: bool = False) -> Tensors:
        self.begin_backward(microbatch, output_grads)
        shape = self.flights.shape_of(self.numbers(microbatch)[0])
        if shape is not None:
            self._recompute_nodes(microbatch, sliced(shape, self.slices))
        for node in self.shape.backward_order:
            if self.shape.nodes[node].exchange:
                self.start_backward(microbatch, node)
                self.wait_backward(microbatch, node)
            else:
                self.run_backward(microbatch, node)
        gradients = self.input_gradients(microbatch)
        self.end_backward(microbatch)
        if not defer:
            self.weight(microbatch)
        return gradients

    def recompute(self, microbatch: int) -> None:
        self.begin_recompute(microbatch)
        self._recompute_nodes(microbatch, self.shape_with_r)
        self.recompute_rest(microbatch)
        self.end_recompute(microbatch)

    def _recompute_nodes(self, microbatch: int, shape: StageShape) -> None:
        for node in shape.recomputed:
            if shape.nodes[node].exchange:
                self.start_recompute(microbatch, node)
                self.wait_recompute(microbatch, node)
            else:
                self.run_recompute(microbatch, node)

    def weight(self, microbatch: int) -> None:
        for node in self.shape.backward_order:
            if self.shape.nodes[node].weights:
                self.run_weight(microbatch, node)
