"""Segments whose launches are captured once and replayed: forward and backward, a copy for each microbatch in flight.

    values --> static inputs --replay--> static outputs --> copies of them, which go on
    gradients --> static gradients --replay--> gradients of inputs and parameters --> copies of them

A capture holds the tensors for its backward. So there are as many captures of a segment as microbatches are in flight,
and one is free again behind its backward. Copies go out because weight gradients of other segments may be computed
later. The weight gradients of a captured segment are computed in its I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor, nn

from schedc_runtime.device.base import ComputeDevice
from schedc_runtime.device.choice import device_for
from schedc_runtime.device.tape import CaptureRefused, LaunchTape
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.ranks.exchange import RoutingLayer
from schedc_runtime.recompute.levels import draws
from schedc_runtime.segments.graph import Segment, StageGraph

Key = tuple[Any, ...]


class _Use:
    """A microbatch's use of a capture: alive as long as the node of autograd that holds it."""


class SegmentCapture:
    """One capture of a segment. run: the segment on its inputs."""

    def __init__(self, run: Callable[..., tuple[Any, ...]], inputs: Sequence[Tensor], weights: Sequence[Tensor]):
        self._use: weakref[_Use] | None = None
        self.inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
        self.wanted = [each for each in (*self.inputs, *weights) if each.requires_grad]
        seam = device_for(inputs[0].device)
        pool = seam.graph_pool()
        _warm(seam, lambda: self._both(run))
        self._forward, self.outputs, _ = seam.captured(lambda: _tensors(run(*self.inputs)), pool)
        self.sources = [each for each in self.outputs if each.requires_grad]
        self.gradients = [torch.zeros_like(each) for each in self.sources]
        self._backward, self.results, _ = seam.captured(
            lambda: self._differentiated(self.sources, self.gradients), pool
        )
        self.positions = [each.requires_grad for each in (*self.inputs, *weights)]

    def _both(self, run: Callable[..., tuple[Any, ...]]) -> None:
        sources = [each for each in _tensors(run(*self.inputs)) if each.requires_grad]
        self._differentiated(sources, [torch.zeros_like(each) for each in sources])

    def _differentiated(self, sources: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        if not sources:
            return (None,) * len(self.wanted)
        return torch.autograd.grad(sources, self.wanted, gradients, allow_unused=True)

    @property
    def free(self) -> bool:
        """Whether no microbatch uses it: its backward has run, or will not."""
        return self._use is None or self._use() is None

    def release(self) -> None:
        self._use = None

    def forward(self, inputs: Sequence[Tensor], use: _Use) -> tuple[Tensor, ...]:
        """[...] outputs for inputs in the shapes of the capture."""
        self._use = weakref(use)
        for static, value in zip(self.inputs, inputs, strict=True):
            static.detach().copy_(value)
        self._forward()
        return tuple([each.detach().clone() for each in self.outputs])

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients of inputs and weights, in their shapes. gradients: [...] of the outputs; None is zero."""
        given = (each for each, output in zip(gradients, self.outputs, strict=True) if output.requires_grad)
        for static, value in zip(self.gradients, given, strict=True):
            if value is None:
                static.zero_()
            else:
                static.copy_(value)
        self._backward()
        self.release()
        results = iter(self.results)
        found = [next(results) if wanted else None for wanted in self.positions]
        return tuple([None if each is None else each.clone() for each in found])


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, capture: SegmentCapture, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.capture, ctx.use = capture, _Use()
        ctx.set_materialize_grads(False)
        outputs = capture.forward(tensors[:count], ctx.use)
        fixed = [new for new, old in zip(outputs, capture.outputs, strict=True) if not old.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.capture.backward(gradients)


class CapturedSegments:
    """The captures of a stage's segments. refused: by segment, why it is launched as ever."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._captures: dict[Key, list[SegmentCapture]] = {}

    def told(self) -> str:
        """In words, which segments are captured, and why others are not."""
        names = ", ".join(dict.fromkeys(key[0] for key in self._captures)) or "none so far"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            reasons.setdefault(reason, []).append(name)
        return f"graphs: {names}" + "".join(f"; not {', '.join(each)}: {reason}" for reason, each in reasons.items())

    def run(
        self, graph: StageGraph, module: nn.Module, node: int, taken: Sequence[Any], obstacle: str
    ) -> tuple[Any, ...] | None:
        """The results of segment ``node``, replayed; None where it cannot be. obstacle: why the stage forbids it."""
        segment = graph.nodes[node]
        assert isinstance(segment, Segment)
        if segment.name in self.refused:
            return None
        reason = obstacle or why_not(segment, module, taken)
        if reason:
            self.refused[segment.name] = reason
            return None
        weights = graph.parameters(node)
        key = segment.name, *[(x.shape, x.dtype, x.stride(), x.requires_grad) for x in taken], *map(_address, weights)
        try:
            capture = self._free(key, lambda *values: segment.run(module, *values), taken, weights)
        except CaptureRefused as refusal:
            self.refused[segment.name] = str(refusal)
            return None
        results: tuple[Any, ...] = _Replayed.apply(capture, len(taken), *taken, *weights)  # type: ignore[no-untyped-call]
        return results

    def _free(
        self, key: Key, run: Callable[..., tuple[Any, ...]], taken: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> SegmentCapture:
        captures = self._captures.setdefault(key, [])
        for capture in captures:
            if capture.free:
                return capture
        try:
            with _unnumbered():
                captures.append(SegmentCapture(run, taken, weights))
        finally:
            if not captures:
                del self._captures[key]
        return captures[-1]

    def reset(self) -> None:
        """All captures are free: the microbatches in flight are given up."""
        for captures in self._captures.values():
            for capture in captures:
                capture.release()


@contextmanager
def _unnumbered() -> Iterator[None]:
    """Draws inside do not count: a capture that is refused for them has no effect on those of the step."""
    numbers = session()
    if numbers is None:
        yield
        return
    before, numbers.current = numbers.current, None
    try:
        yield
    finally:
        numbers.current = before


def why_not(segment: Segment, module: nn.Module, taken: Sequence[Any]) -> str:
    """Why a segment cannot be captured whatever it computes; empty where it may be."""
    if not taken or not all(isinstance(value, Tensor) for value in taken):
        return "it takes values other than tensors"
    called = [each for path in segment.modules for each in module.get_submodule(path).modules()]
    layers = [name for name, each in module.named_modules() if isinstance(each, RoutingLayer)]
    inside = [path for path in segment.modules if any(f"{path}.".startswith(f"{layer}.") for layer in layers)]
    if inside or any(isinstance(each, RoutingLayer) for each in called):
        return "steps of a MoE layer count on the host what they do"
    if any(each.training and draws(each) for each in called):
        return "a module draws random numbers, whose keys the host sets"
    if any(each._forward_hooks or each._forward_pre_hooks for each in called):
        return "a module has forward hooks"
    return ""


def _tensors(results: tuple[Any, ...]) -> tuple[Tensor, ...]:
    if not all(isinstance(each, Tensor) for each in results):
        raise CaptureRefused("it gives values other than tensors")
    return results


def _address(weight: Tensor) -> int:
    return weight.data_ptr()


def _warm(seam: ComputeDevice, call: Callable[[], Any]) -> None:
    """Run a call as often as a capture needs it before. Raises `CaptureRefused` for what cannot be captured."""
    if seam.supports("graphs"):
        return
    side = seam.stream("capture")
    seam.record().wait(side)
    with seam.on(side):
        call()  # libraries make their workspaces
        with LaunchTape():
            call()
    seam.record(side).wait(seam.current())
