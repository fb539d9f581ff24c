"""Contexts around a call: gradients of earlier steps set aside, evaluation mode, a step undone and run again.

A step that had more rows than bounded buffers hold is undone, as if it had not run, and run again with exact sizes.
Undone are gradients, buffers, the counts of MoE layers, and torch's generators where numbers are not drawn by name.
What hooks and attributes of the user's modules have changed stays changed.

A call begins with a copy of the buffers and of the gradients that are there: with `accumulate` gradients count twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from schedc_runtime.device.choice import gpu
from schedc_runtime.moe.counts import Flag
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.moe.sizes import Marks
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.stage.stage import Stage

NOTHING = nullcontext()
"""Where a call has nothing to set aside, or to put back. One for all."""


def own_parameters(assembly: Assembly) -> dict[str, nn.Parameter]:
    """Parameters whose gradients no call sets aside, by name."""
    aside = {id(each) for stage in assembly.copied for each in stage.module.parameters()}
    aside |= {id(each) for each in assembly.weights.parameters()}
    named = (pair for stage in assembly.held() for pair in stage.module.named_parameters())
    return {name: each for name, each in named if id(each) not in aside}


def isolated_gradients(
    copied: Iterable[Stage], tied: Iterable[nn.Parameter] = (), written: Collection[int] = ()
) -> AbstractContextManager[None]:
    """Sets the gradients of earlier steps aside, and adds them when the step has succeeded.

    Sums over copies and replicas must see this step's gradients only: those of earlier steps have been summed before.
    copied: the stages that another rank holds, too. tied: parameters that a stage of another rank uses, too.
    written: ids of gradients that the call writes itself, so that they are copied.
    """
    if not torch.is_grad_enabled():
        return NOTHING
    both = (*(p for stage in copied for p in stage.module.parameters()), *tied)
    return _set_aside(list({id(p): p for p in both}.values()), written) if both else NOTHING


@contextmanager
def _set_aside(parameters: Sequence[nn.Parameter], written: Collection[int]) -> Iterator[None]:
    before = [grad if (grad := p.grad) is None or id(grad) not in written else grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, old in zip(parameters, before, strict=True):
        if old is not None:
            parameter.grad = old if parameter.grad is None else old + parameter.grad


class LayerCounts(NamedTuple):
    """What the microbatches of a call add up in a MoE layer.

    All are scalars. rows: of its experts. padded_rows: with padding. balance: the sum of auxiliary losses, if any.
    """

    rows: Tensor | int
    padded_rows: Tensor | int
    balance: Tensor | None
    microbatches: int

    @staticmethod
    def of(layer: MoELayer) -> LayerCounts:
        planner, balance = layer.planner, layer.balance
        return LayerCounts(planner.rows, planner.padded_rows, balance.total, balance.microbatches)

    def put(self, layer: MoELayer) -> None:
        """Let the layer go on from here."""
        layer.planner.rows, layer.planner.padded_rows = self.rows, self.padded_rows
        layer.balance.total, layer.balance.microbatches = self.balance, self.microbatches

    def copied(self) -> LayerCounts:
        """The same in memory of their own."""
        return LayerCounts._make(each.clone() if isinstance(each, Tensor) else each for each in self)

    def plus(self, other: LayerCounts) -> LayerCounts:
        """Both together. Nothing is added to a count that is 0."""
        balance = other.balance if self.balance is None else self.balance
        if self.balance is not None and other.balance is not None:
            balance = self.balance + other.balance
        rows = other.rows if isinstance(self.rows, int) and not self.rows else self.rows + other.rows
        padded = self.padded_rows + other.padded_rows
        return LayerCounts(rows, padded, balance, self.microbatches + other.microbatches)


def isolated_counts(layers: Sequence[MoELayer]) -> AbstractContextManager[None]:
    """Sets the counts of earlier calls aside, and adds them when the call has succeeded.

    Counts of a call then begin anew in each, as a graph of a step needs it.
    """
    return _counts_aside(layers) if layers else NOTHING


@contextmanager
def _counts_aside(layers: Sequence[MoELayer]) -> Iterator[None]:
    before = [LayerCounts.of(layer) for layer in layers]
    for layer in layers:
        LayerCounts(0, 0, None, 0).put(layer)
    yield
    for layer, old in zip(layers, before, strict=True):
        old.plus(LayerCounts.of(layer)).put(layer)


@contextmanager
def evaluating(stages: Iterable[Stage]) -> Iterator[None]:
    """Puts all modules into evaluation mode, and each back to its own mode afterwards."""
    modules = [(module, module.training) for stage in stages for module in stage.module.modules()]
    for module, _ in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in modules:
            module.training = training


class Undo:
    """What a call changes, as it was before. generators: whether torch's own generators draw."""

    def __init__(self, modules: Iterable[nn.Module], layers: Sequence[MoELayer], *, generators: bool) -> None:
        self._modules, self._layers, self._generators = list(modules), layers, generators
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._gradients: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = []
        self._counts: list[LayerCounts] = []
        self._states: list[Tensor] = []

    @torch.no_grad()
    def begin(self, training: bool) -> None:
        """A call begins. An evaluation changes no gradient."""
        parameters = {id(p): p for module in self._modules for p in module.parameters()} if training else {}
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.clone())
            for parameter in parameters.values()
        ]
        # Version counters do not show every change: a batch norm changes statistics without a count.
        self._buffers = [
            (owner, name, buffer, buffer.clone())
            for module in self._modules
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._counts = [LayerCounts.of(layer) for layer in self._layers]
        if self._generators:
            self._states = [torch.get_rng_state(), *gpu.generator_states()]

    @torch.no_grad()
    def undo(self) -> None:
        """Bring back what `begin` saw."""
        for parameter, gradient, values in self._gradients:
            if gradient is not None and values is not None:
                gradient.copy_(values)
            parameter.grad = gradient
        for owner, name, buffer, values in self._buffers:
            owner._buffers[name] = buffer.copy_(values)
        for layer, counts in zip(self._layers, self._counts, strict=True):
            counts.put(layer)
        if self._states:
            torch.set_rng_state(self._states[0])
            gpu.set_generator_states(self._states[1:])

    def end(self) -> None:
        """The call holds: let go of the copies."""
        self._gradients, self._buffers, self._counts, self._states = [], [], [], []


@contextmanager
def exact_sizes(layers: Sequence[MoELayer]) -> Iterator[None]:
    """Lets MoE layers whose buffers are bounded run with exact sizes."""
    before = [layer.counter.bound for layer in layers]
    for layer in layers:
        layer.counter.bound, layer.planner.repeating = None, True
    try:
        yield
    finally:
        for layer, bound in zip(layers, before, strict=True):
            layer.counter.bound, layer.planner.repeating = bound, False


def layers_over(layers: Iterable[MoELayer], marks: Marks) -> Iterator[MoELayer]:
    """The layers in whose own expert group a rank had more rows. marks: flags of all layers, of all groups."""
    names = {where for where, _ in marks}
    for layer in layers:
        own = [flags for where, flags in layer.planner.flags.items() if where in names]
        if own and bool((torch.stack(own) & Flag.OVERFLOW).any()):
            yield layer
