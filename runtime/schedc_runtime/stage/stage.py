"""One stage of the model: the forward, input gradient and weight gradient of one microbatch. It never decides when.

    forward(m)                F    keeps what the backward of m needs
    backward(m, defer=False)  B    frees it, weight gradients included
    backward(m, defer=True)   I    frees the graph, keeps the weight work of m
    weight(m)                 W    runs that work
    forward(m,                F    keeps its inputs, or what the level of recomputation keeps
        recompute_later=True)
    recompute(m)              R    recomputes the rest of what the backward of m needs

Every stage is cut off from its neighbours: its inputs are detached leaves, its outputs are given away detached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from schedc.plan.values import Level, Recompute
from schedc_runtime.errors import StageError
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.recompute.levels import MicrobatchRecorder, Recomputation, draws
from schedc_runtime.recompute.levels import install as install_regions
from schedc_runtime.recompute.levels import uninstall as uninstall_regions
from schedc_runtime.recompute.whole_stage import Checkpoint, Checkpoints, save_nothing
from schedc_runtime.stage.weight_gradients import Vectors, WeightSink, install, uninstall

LossFunction = Callable[[Any, Any], Tensor]
"""loss_fn(output of the model, target) -> scalar, for one microbatch."""


class _BackwardState(NamedTuple):
    """What the backward of a microbatch needs."""

    inputs: tuple[Tensor, ...]
    """The differentiable inputs: leaves that collect the gradients to send back."""
    outputs: tuple[GradientEdge | None, ...]
    """Where the gradient of each differentiable output enters the graph, None where nothing in this stage wants it;
    on the last stage that of the scaled loss alone. The output itself is not kept: whoever got it decides."""
    recorder: MicrobatchRecorder | None
    """Where something is recomputed."""


class KeptInputs(NamedTuple):
    """What a microbatch keeps that runs once more as a whole."""

    inputs: tuple[Tensor, ...]
    target: Any
    loss_scale: float
    checkpoint: Checkpoint


class Stage:
    """A stage module with the state of the microbatches in flight.

    module: takes the values of boundary ``index`` and returns those of boundary ``index + 1`` (see `Partition`).
    index, stages: this stage's number and how many there are.
    loss_fn: of the last stage; without one the last stage gives its output away like any other.
    deferring: whether weight gradients may be left to `weight`. Handing them on costs some 20 us per layer, which a
        program without W does not pay. It is part of the computation: a weight that one microbatch uses twice is
        summed in another order by autograd, so a pipeline and its reference choose alike (`splits_backward`).

    `bind` must have been called with the boundaries of the current input signature before `forward`.
    """

    def __init__(
        self, module: nn.Module, index: int, stages: int, *, loss_fn: LossFunction | None = None, deferring: bool = True
    ) -> None:
        self.module, self.index, self.stages, self.deferring = module, index, stages, deferring
        self.loss_fn = loss_fn if index == stages - 1 else None
        self.losses: dict[int, Tensor] = {}
        """Loss of each microbatch, detached and not scaled; on the last stage. The caller clears it: `take_losses`."""
        self._held: dict[int, _BackwardState] = {}
        self.kept: dict[int, KeptInputs] = {}
        """Microbatches that wait for their R."""
        self._input: Boundary
        self._output: Boundary
        self._one: Tensor
        self._sink = WeightSink()
        self._memory = Recomputation(Recompute(), None, False)
        self._checkpoints = Checkpoints(module)
        self._vectors = Vectors(module)
        if deferring:
            install(module, self._sink)

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Microbatches whose forward has run and whose backward (B or I) has not."""
        return tuple(sorted({*self._held, *self.kept}))

    @property
    def pending(self) -> tuple[int, ...]:
        """Microbatches whose weight gradients are deferred."""
        return tuple(sorted(self._sink.pending))

    def bind(self, input: Boundary, output: Boundary) -> None:
        """Set what crosses on both sides, for the input signature of the microbatches to come."""
        self.check_empty()
        self._input, self._output = input, output

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        target: Any = None,
        loss_scale: float = 1.0,
        *,
        recompute_later: bool = False,
    ) -> tuple[Tensor, ...]:
        """F: the tensors of the output boundary, detached; they may be sent, but must not be written to.

        inputs: the tensors of the input boundary, in order; not written to, and held until the backward has run.
        target: what ``loss_fn`` gets as its second argument, on the last stage. loss_scale: factor of the loss
        that is differentiated (1 / microbatches for a mean); `losses` keeps the loss without it.
        recompute_later: `recompute` will run before the backward.

        With gradients switched off (evaluation) nothing is kept.
        """
        if not torch.is_grad_enabled():
            result = self.module(*self._input.unpack(inputs))
            if self.loss_fn is not None and target is not None:
                self.losses[microbatch] = self.loss_fn(result, target)
            return self._output.pack(result)
        if microbatch in self._held or microbatch in self.kept:
            raise StageError(f"stage {self.index}: microbatch {microbatch} is forwarded again before its backward")
        if not (recompute_later and self.recomputes_whole):
            within = self._memory.forwarding()
            outputs, self._held[microbatch] = self._through(microbatch, inputs, target, loss_scale, within)
            return tuple([t.detach() for t in outputs])
        checkpoint = self._checkpoints.begin(device_holding(inputs))
        outputs, _ = self._through(microbatch, inputs, target, loss_scale, save_nothing())
        self._checkpoints.end(checkpoint)
        self.kept[microbatch] = KeptInputs(tuple(inputs), target, loss_scale, checkpoint)
        return tuple([t.detach() for t in outputs])

    def recompute(self, microbatch: int) -> None:
        """R: work out again what the forward of ``microbatch``, told so, did not keep for its backward."""
        if (kept := self.kept.pop(microbatch, None)) is not None:
            inputs, target, loss_scale, checkpoint = kept
            with checkpoint.restored():
                within = self._memory.forwarding()
                _, self._held[microbatch] = self._through(microbatch, inputs, target, loss_scale, within)
        elif (held := self._held.get(microbatch)) is None:
            raise StageError(f"stage {self.index}: microbatch {microbatch} has not been forwarded")
        elif held.recorder is not None:
            held.recorder.fill_all()

    def _through(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        target: Any,
        loss_scale: float,
        within: AbstractContextManager[MicrobatchRecorder | None],
    ) -> tuple[Sequence[Tensor], _BackwardState]:
        """The outputs of a microbatch, and what its backward needs. within: what sees to what autograd saves."""
        leaves = self._detach(inputs)
        with within as recorder:
            result = self._call(leaves)
        outputs = self._output.pack(result)
        differentiable = tuple(outputs[i] for i in self._output.differentiable)
        if self.loss_fn is not None:
            loss = self.loss_fn(result, target)
            check_loss(loss)
            self.losses[microbatch] = loss.detach()
            differentiable = (loss * loss_scale,)
            self._one = torch.ones_like(loss)
        held = _BackwardState(
            tuple([leaves[i] for i in self._input.differentiable]),
            tuple([get_gradient_edge(t) if t.requires_grad else None for t in differentiable]),
            recorder,
        )
        return outputs, held

    def backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] = (), *, defer: bool = False
    ) -> tuple[Tensor, ...]:
        """B, or with ``defer`` I: the gradient of each differentiable input, zeros where nothing depends on it.

        output_grads: one per differentiable output (`Boundary.gradients`), None for zero; empty on a stage that
        forms the loss. They are not written to. The microbatch's graph is freed.
        """
        held = self._pop(microbatch)
        if self.loss_fn is not None:
            output_grads = (self._one,)
        elif len(output_grads) != len(held.outputs):
            raise StageError(
                f"stage {self.index}: {len(output_grads)} output gradients for {len(held.outputs)} outputs"
            )
        if defer:
            if not self.deferring:
                raise StageError(f"stage {self.index} was made without deferred weight gradients", "deferring=True")
            with self._sink.deferring(microbatch, self._vectors.late()):
                self._differentiate(held, output_grads)
        else:
            self._differentiate(held, output_grads)
        return tuple([torch.zeros_like(t) if t.grad is None else t.grad for t in held.inputs])

    def weight(self, microbatch: int) -> None:
        """W: compute the deferred weight gradients of ``microbatch`` and add them to ``parameter.grad``."""
        if microbatch not in self._sink.pending:
            raise StageError(f"stage {self.index}: microbatch {microbatch} has no deferred weight gradients")
        self._sink.flush(microbatch)

    def set_recomputation(self, plan: Recompute, *, count: bool = False) -> None:
        """Work out again, in the backward, what ``plan`` says. count: keep account of what is held even so."""
        self.check_empty()
        self._memory = Recomputation(plan, None, draws(self.module), count=count)
        install_regions(self.module)

    def prepare_recompute(self) -> None:
        """There are Rs: make ready for forwards with ``again``.

        They let go of what the level of `recompute` does. Without one it is the whole stage, whose exchanges are sent
        again; where a `MoELayer` is inside it is level `full`.
        """

    @property
    def recomputes_whole(self) -> bool:
        """Whether an R runs the whole forward once more: no level says what of it."""
        return self._memory.level is Level.NONE

    @property
    def recomputation(self) -> Recomputation:
        """What is worked out again here."""
        return self._memory

    def end_step(self) -> None:
        """A step is over: decide what the next one recomputes."""
        if self._memory.adaptive is not None:
            self._memory.adaptive.end_step()

    def take_losses(self) -> dict[int, Tensor]:
        """Loss of each microbatch since the last call, not scaled."""
        losses, self.losses = self.losses, {}
        return losses

    def check_empty(self) -> None:
        """Raise unless every microbatch has been through F, B or I, and W."""
        if self.in_flight or self.pending:
            raise StageError(
                f"stage {self.index} still holds microbatches {list(self.in_flight)} (no backward yet) and"
                f" {list(self.pending)} (no weight gradients yet)",
                "finish the step, or call reset() to give it up",
            )

    def reset(self) -> None:
        """Forget every microbatch in flight, as after a step that failed."""
        self._held.clear()
        self.kept.clear()
        self._sink.pending.clear()
        self.losses = {}

    def release(self) -> None:
        """Give the module back as it was before this stage was made of it; the stage is not usable afterwards."""
        self.reset()
        uninstall_regions(self.module)
        uninstall(self.module)

    def _detach(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inputs as leaves of this stage's own graph, those with a gradient marked so."""
        leaves = [t.detach() for t in inputs]
        for position in self._input.differentiable:
            leaves[position].requires_grad_()
        return tuple(leaves)

    def _call(self, leaves: Sequence[Tensor]) -> Any:
        try:
            return self.module(*self._input.unpack(leaves))
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise StageError(
                f"stage {self.index} writes into its input, which belongs to the stage before ({error})",
                "begin the block with an operation that makes a new tensor: x = x + y rather than x += y, and no"
                " inplace=True",
            ) from error

    def _check_kept(self, microbatch: int) -> None:
        if microbatch in self.kept:
            raise StageError(f"stage {self.index}: the backward of microbatch {microbatch} comes before its R")

    def _pop(self, microbatch: int) -> _BackwardState:
        self._check_kept(microbatch)
        if microbatch not in self._held:
            raise StageError(f"stage {self.index}: microbatch {microbatch} has not been forwarded")
        return self._held.pop(microbatch)

    @staticmethod
    def _differentiate(held: _BackwardState, output_grads: Sequence[Tensor | None]) -> None:
        pairs = [
            (edge, grad)
            for edge, grad in zip(held.outputs, output_grads, strict=True)
            if edge is not None and grad is not None
        ]
        if pairs:
            differentiate(tuple([edge for edge, _ in pairs]), tuple([grad for _, grad in pairs]))


_engine = torch.autograd.Variable._execution_engine
"""What `torch.autograd.backward` calls after 10 us of checks in Python; the engine itself checks the shapes again."""


def differentiate(edges: tuple[GradientEdge, ...], grads: tuple[Tensor, ...]) -> None:
    """`torch.autograd.backward`, for gradients that are there: into the leaves, freeing the graph."""
    _engine.run_backward(edges, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


def device_holding(tensors: Sequence[Tensor]) -> torch.device:
    """Where ``tensors`` lie; the CPU if there are none."""
    return tensors[0].device if tensors else torch.device("cpu")


def mean_loss(losses: Mapping[int, Tensor]) -> Tensor:
    """The mean over all microbatches, whatever order they came in: summed in ascending microbatch order."""
    return torch.stack([losses[microbatch] for microbatch in sorted(losses)]).mean()


def check_loss(loss: Any) -> None:
    """Raise `StageError` unless a loss function has given a scalar."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise StageError(f"loss_fn returned {shown}", "return a scalar tensor: the mean over one microbatch")
