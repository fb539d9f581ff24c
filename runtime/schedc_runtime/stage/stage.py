"""One stage of the model: the forward, input gradient and weight gradient of one microbatch. It never decides when.

    forward(m)                F    keeps what the backward of m needs
    backward(m, defer=False)  B    frees it, weight gradients included
    backward(m, defer=True)   I    frees the graph, keeps the weight work of m
    weight(m)                 W    runs that work
    forward(m,                F    keeps its inputs, or what the level of recomputation keeps
        recompute_later=True)
    recompute(m)              R    recomputes the rest of what the backward of m needs

Every stage is detached from its neighbours: its inputs are detached leaves, and it returns detached outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from schedc.cell.graph import StageShape
from schedc.ir.plan import Level, Recompute
from schedc_runtime.errors import StageError
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.random_numbers.numbering import Numbering
from schedc_runtime.recompute.layers import mark_layers, unmark_layers
from schedc_runtime.recompute.levels import MicrobatchRecorder, Recomputation, draws
from schedc_runtime.recompute.levels import install as install_regions
from schedc_runtime.recompute.levels import uninstall as uninstall_regions
from schedc_runtime.recompute.whole_stage import Checkpoints, save_nothing
from schedc_runtime.stage.engine import differentiate, edge_of, refuse_writing
from schedc_runtime.stage.hooks import HookMark, has_hooks, hook_mark
from schedc_runtime.stage.offloaded import KeptInputs, OffloadedStage
from schedc_runtime.stage.split import SplitBackward, is_late
from schedc_runtime.stage.taken import Taken, let_go

LossFunction = Callable[[Any, Any], Tensor]
"""loss_fn(output of the model, target) -> scalar, for one microbatch."""
FuseSegment = Callable[[str, nn.Module, str], Callable[..., tuple[Any, ...]]]
"""(segment, calls between its modules, name by which they draw) -> what runs in their place."""


class _BackwardState(NamedTuple):
    """What the backward of a microbatch needs."""

    inputs: tuple[Tensor | Taken, ...]
    """What collects the gradients to send back: the differentiable inputs as leaves. Where a recorder says what is
    saved, they are not held."""
    outputs: tuple[GradientEdge | None, ...]
    """Where the gradient of each differentiable output enters the graph; None where this stage needs none. On the last
    stage it is the edge of the loss alone. The outputs themselves are not held here."""
    loss_gradient: Tensor | None
    """[] the loss scale, on a stage that forms the loss."""
    recorder: MicrobatchRecorder | None
    """Records what is saved; None if nothing is recomputed."""
    began: HookMark | None
    """When the forward began; None before the stage's first I."""


class Stage(OffloadedStage):
    """A stage module with the state of the microbatches in flight.

    module: takes the values of boundary ``index`` and returns those of boundary ``index + 1`` (see `StageModules`).
    index, stages: this stage's number, and the number of stages. blocks: paths of the model's blocks in the module.
    loss_fn: loss of the last stage. Without one the last stage returns its output like any other.
    in_order: whether the Ws come in the order of the Is. What I computes of parameters is then held by nobody.

    Call `bind` with the boundaries of the current input signature before `forward`.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        *,
        blocks: Sequence[str] = (),
        loss_fn: LossFunction | None = None,
        in_order: bool = False,
    ) -> None:
        super().__init__(module, index)
        self.stages, self.blocks = stages, tuple(blocks)
        self._late = has_hooks if in_order else is_late
        self.loss_fn = loss_fn if index == stages - 1 else None
        self.losses: dict[int, Tensor] = {}
        """Loss of each microbatch on the last stage, detached and not scaled. `take_losses` clears it."""
        self._states: dict[int, Any] = {}
        """What the backward of each microbatch in flight needs: a `_BackwardState` where the stage is one node."""
        self.numbering: Numbering | None = None
        """Sets the random numbers of each forward by name, in a step that numbers them so."""
        self._input: Boundary
        self._output: Boundary
        self._last_gradient: tuple[Any, Tensor] | None = None
        """The last loss scale with the loss's dtype, device and class, and the gradient of the loss that they gave."""
        self._split = SplitBackward()
        self._defers = False
        """Whether there was an I. Only split backwards use the marks that forwards take."""
        self._memory = self._memory_with_r = Recomputation(Recompute(), None, False)
        """The recomputation of microbatches, and of those with an R."""
        self._checkpoints = Checkpoints(module)

    @property
    def shape(self) -> StageShape | None:
        """The graph of a microbatch, as plain data; None where the stage runs as a whole, as one node."""
        return None

    @property
    def shape_with_r(self) -> StageShape | None:
        """The graph of microbatches with an R, as plain data."""
        return self.shape

    @property
    def _own_shape(self) -> StageShape | None:
        """The graph of a slice."""
        return None

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Microbatches whose forward has run and whose backward (B or I) has not."""
        return tuple(sorted({number // self.slices for number in (*self._states, *self.kept)}))

    @property
    def pending(self) -> tuple[int, ...]:
        """Microbatches whose weight gradients are deferred."""
        return tuple(sorted(self._split.pending))

    def bind(self, input: Boundary, output: Boundary) -> None:
        """Set the boundaries on both sides, for the input signature of the next microbatches."""
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
        """F: the tensors of the output boundary, detached. They may be sent, but must not be written to.

        inputs: the tensors of the input boundary, in order. They are held until the backward, and not written to.
        target: second argument of ``loss_fn``, on the last stage. loss_scale: factor of the loss that is
        differentiated, 1 / microbatches for a mean; `losses` keeps the loss without it.
        recompute_later: `recompute` will run before the backward.
        With gradients off (evaluation) nothing is held.
        """
        if not torch.is_grad_enabled():
            with self.drawing(microbatch):
                result = self.module(*self._input.unpack(inputs))
                if self.loss_fn is not None and target is not None:
                    self.losses[microbatch] = self.loss_fn(result, target)
            return self._output.pack(result)
        if microbatch in self._states or microbatch in self.kept:
            raise StageError(f"stage {self.index}: microbatch {microbatch} is forwarded again before its backward")
        offload = None if self.offload is None else self.offload.begin(microbatch)
        if not (recompute_later and self.recomputes_whole):
            within = self._memory.forwarding(offload)
            outputs, self._states[microbatch] = self._through(microbatch, inputs, target, loss_scale, within)
            return tuple([t.detach() for t in outputs])
        checkpoint = self._checkpoints.begin(device_holding(inputs))
        outputs, _ = self._through(microbatch, inputs, target, loss_scale, save_nothing(), again=True)
        self._checkpoints.end(checkpoint)
        self.kept[microbatch] = KeptInputs(tuple(inputs), target, loss_scale, checkpoint)
        return tuple([t.detach() for t in outputs])

    def recompute(self, microbatch: int) -> None:
        """R: recompute what the forward of ``microbatch`` with ``recompute_later`` did not hold for the backward."""
        if (kept := self._pop_kept(microbatch)) is not None:
            inputs, target, loss_scale, checkpoint = kept
            with checkpoint.restored():
                within = self._memory.forwarding()
                _, self._states[microbatch] = self._through(microbatch, inputs, target, loss_scale, within)
        elif (recorder := self._state(microbatch).recorder) is not None:
            recorder.fill_all()

    def _through(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        target: Any,
        loss_scale: float,
        within: AbstractContextManager[MicrobatchRecorder | None],
        *,
        again: bool = False,
    ) -> tuple[Sequence[Tensor], _BackwardState]:
        """The outputs of a microbatch, and what its backward needs.

        within: decides what autograd saves. again: whether R will run all of this a second time.
        """
        began = hook_mark() if self._defers else None
        entering = self._detach(inputs)
        leaves: tuple[Tensor | Taken, ...] = entering
        with self.drawing(microbatch):
            with within as recorder:
                if recorder is not None:
                    pairs = [let_go(tensor) for tensor in entering]
                    entering, leaves = tuple([x for x, _ in pairs]), tuple([taken for _, taken in pairs])
                try:
                    result = self.module(*self._input.unpack(entering))
                except RuntimeError as error:
                    what = f"stage {self.index} writes into its input, which belongs to the stage before"
                    refuse_writing(error, what)
                    raise
            with torch.set_grad_enabled(not again):  # a loss may add gradients at once
                loss = None if self.loss_fn is None else self._loss_of(self.loss_fn, result, target, recorder)
        outputs = self._output.pack(result)
        differentiable = tuple([outputs[i] for i in self._output.differentiable])
        loss_gradient = None
        if self.loss_fn is not None:
            loss = check_loss(loss)
            self.losses[microbatch] = loss.detach()
            differentiable, loss_gradient = (loss,), self._loss_gradient(loss, loss_scale)
        saved = _BackwardState(
            tuple([leaves[i] for i in self._input.differentiable]),
            tuple([edge_of(t) for t in differentiable]),
            loss_gradient,
            recorder,
            began,
        )
        return outputs, saved

    def backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] = (), *, defer: bool = False
    ) -> tuple[Tensor, ...]:
        """B, or I with ``defer``: the gradient of each differentiable input, zeros where no output depends on it.

        output_grads: one per differentiable output (`Boundary.gradients`), of its shape; None is zero. Empty on a stage
        that forms the loss. They are not written to. The microbatch's graph is freed.
        """
        saved: _BackwardState = self._state(microbatch)
        self._end_offload(microbatch)
        del self._states[microbatch]
        if saved.loss_gradient is not None:
            output_grads = (saved.loss_gradient,)
        elif len(output_grads) != len(saved.outputs):
            raise StageError(
                f"stage {self.index}: {len(output_grads)} output gradients for {len(saved.outputs)} outputs"
            )
        entering = zip(saved.outputs, output_grads, strict=True)
        self._differentiate(microbatch, entering, self._late if defer else None, saved.began)
        return tuple([_zeros(t) if t.grad is None else t.grad for t in saved.inputs])

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

    def weight(self, microbatch: int) -> None:
        """W: compute the deferred weight gradients of ``microbatch`` and add them to ``parameter.grad``."""
        if microbatch not in self._split.pending:
            raise StageError(f"stage {self.index}: microbatch {microbatch} has no deferred weight gradients")
        self._split.weight(microbatch)

    def set_recomputation(self, plan: Recompute, *, count: bool = False) -> None:
        """Recompute what ``plan`` says. count: count the bytes that are held."""
        self.check_empty()
        self._memory = self._memory_with_r = Recomputation(plan, self._own_shape, draws(self.module), count=count)
        self.install_regions(plan)

    def install_regions(self, plan: Recompute) -> None:
        """Make regions of the module's parts, which know their layer where ``plan`` has levels of layers.

        Raises `StageError` for levels of more layers than the stage has.
        """
        unmark_layers(self.module)
        install_regions(self.module, self.blocks if plan.level >= Level.LAYER else ())
        if plan.layers:
            mark_layers(self.module, self.blocks, sum(run.layers for run in plan.layers), self.index)

    def fuse_segments(self, fuse: FuseSegment | None) -> None:
        """Let calls between the modules of each segment run as ``fuse`` says; None: as the model has them.

        A stage that runs as a whole has no segments.
        """

    def prepare_recompute(self) -> None:
        """Prepare for forwards with ``recompute_later``: the program has Rs of this stage.

        Such a forward frees what the level of `set_recomputation` frees. Without a level it frees the whole stage; its
        R sends the exchanges a second time. A stage with a `MoELayer` then takes the level `full`.
        """

    @property
    def recomputes_whole(self) -> bool:
        """Whether an R runs the whole forward a second time, because no level was set."""
        return self._memory_with_r.level is Level.NONE

    @property
    def recomputation(self) -> Recomputation:
        """The recomputation of this stage."""
        return self._memory

    def end_step(self) -> None:
        """A step is over: decide what the next step recomputes."""
        if self.offload is not None:
            self.offload.end_step()
        if self._memory.adaptive is not None:
            self._memory.adaptive.end_step()

    def drawing(self, microbatch: int, node: int = -1) -> AbstractContextManager[None]:
        """Wraps a forward of ``microbatch``, or of one node of it, which may draw random numbers."""
        return nullcontext() if self.numbering is None else self.numbering.forward(microbatch, node)

    def take_losses(self) -> dict[int, Tensor]:
        """Loss of each microbatch since the last call, by microbatch: scalars, without the loss scale."""
        losses, self.losses = self.losses, {}
        return losses

    def check_empty(self) -> None:
        """Raise `StageError` unless every microbatch has run F, B or I, and W."""
        if self.in_flight or self.pending:
            raise StageError(
                f"stage {self.index} still holds microbatches {list(self.in_flight)} (no backward yet) and"
                f" {list(self.pending)} (no weight gradients yet)",
                "finish the step, or call reset() to give it up",
            )

    def reset(self) -> None:
        """Forget every microbatch in flight, after a step that failed."""
        self._states.clear()
        self.kept.clear()
        self._split.pending.clear()
        self.losses = {}
        self._reset_copies()

    def release(self) -> None:
        """Restore the module as it was before this stage. The stage cannot be used afterwards."""
        self.reset()
        unmark_layers(self.module)
        self._release_copies()
        uninstall_regions(self.module)

    def _detach(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inputs as leaves of this stage's graph. Differentiable inputs require a gradient."""
        leaves = [t.detach() for t in inputs]
        for position in self._input.differentiable:
            leaves[position].requires_grad_()
        return tuple(leaves)

    def _loss_gradient(self, loss: Tensor, scale: float) -> Tensor:
        """[] ``scale`` as the gradient of the loss: the bits that the backward of ``loss * scale`` begins with."""
        last = self._last_gradient
        kind = (scale, loss.dtype, loss.device, type(loss))
        if last is None or last[0] != kind:
            last = self._last_gradient = (kind, torch.full_like(loss, scale))
        return last[1]

    def _state(self, number: int) -> Any:
        """What the backward of a microbatch, or of a slice, needs."""
        if (state := self._states.get(number)) is None:
            microbatch = number // self.slices
            if number in self.kept:
                raise StageError(f"stage {self.index}: the backward of microbatch {microbatch} comes before its R")
            raise StageError(f"stage {self.index}: microbatch {microbatch} has not been forwarded")
        return state


def _zeros(leaf: Tensor | Taken) -> Tensor:
    return leaf.zeros() if isinstance(leaf, Taken) else torch.zeros_like(leaf)


def device_holding(tensors: Sequence[Tensor]) -> torch.device:
    """The device of ``tensors``, of any shape; the CPU if the sequence is empty."""
    return tensors[0].device if tensors else torch.device("cpu")


def check_loss(loss: Any) -> Tensor:
    """The loss, a scalar; raises `StageError` where a loss function returned anything else."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise StageError(f"loss_fn returned {shown}", "return a scalar tensor: the mean over one microbatch")
    return loss
