"""Whole steps as graphs: three steps run as ever, the fourth is captured, and later ones replay it.

    step 1      makes caches and gradients, on the stream of graphs
    step 2, 3   are watched: what a graph cannot hold in one of them, or what differs, refuses them
    step 4      is captured behind a synchronization and a barrier of all ranks, and replayed
    later       copy the batch to its address, and replay

A graph holds what runs between the first instruction and the last JOIN of this process. Batch, loss report, norms and
optimizer stay outside. Where a device has no graphs a tape of operations takes their place, with the same bits.

Gradients keep their memory, and zeros replace a dropped gradient. A graph itself makes the gradients that a call sets
aside (`isolated_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc_runtime.capture.check import CaptureReport, capture_report
from schedc_runtime.capture.recording import StepRecording, step_recording
from schedc_runtime.device.base import CapturedCall
from schedc_runtime.device.choice import device_for
from schedc_runtime.device.limits import await_event
from schedc_runtime.errors import GraphRefused, RuntimeFault
from schedc_runtime.execute.executor import Executor
from schedc_runtime.moe.layer import MoELayer
from schedc_runtime.pipeline.build.assembly import Assembly
from schedc_runtime.pipeline.build.loss_function import Formed
from schedc_runtime.pipeline.step.call import PipelineCall
from schedc_runtime.pipeline.step.contexts import LayerCounts, own_parameters

OnParts = Callable[[Any], None]
"""Does something with the batch and targets of a step."""
EAGER = 3
"""Steps of a kind that run as ever before one is captured."""
MOST = 8
"""Kinds of steps that become graphs: each keeps its memory."""


class _GraphEffects(NamedTuple):
    """What a step leaves to Python, at the addresses of the graph. aside: gradients [...] that were made inside."""

    formed: dict[int, Formed]
    counts: list[LayerCounts]
    flags: list[dict[str, Tensor]]
    probes: list[list[Any]]
    aside: list[tuple[nn.Parameter, Tensor]]


@dataclass
class _StepKind:
    """Steps of one signature, under one scale. executors: those that run it. inputs: batch [...] at its address."""

    executors: Sequence[Executor]
    recordings: list[StepRecording] = field(default_factory=list)
    inputs: Any = None
    captured: CapturedCall | None = None
    effects: _GraphEffects | None = None
    addresses: dict[str, tuple[int, bool]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)
    """Memory from outside that the graph reads: it must not be freed while the graph is there."""
    replays: int = 0


class StepGraphs:
    """The graphs of one pipeline. layers: its MoE layers."""

    def __init__(self, assembly: Assembly, layers: Sequence[MoELayer]) -> None:
        self._assembly, self._layers, self._own = assembly, layers, own_parameters(assembly)
        own = {id(each) for each in self._own.values()}
        every = {id(each): each for stage in assembly.held() for each in stage.module.parameters()}
        self._aside = [parameter for number, parameter in every.items() if number not in own]
        self._device = device_for(assembly.device)
        self._begun = self._device.current()
        self._stream, self._pool = self._device.stream("capture"), self._device.graph_pool()
        self._kinds: dict[str, _StepKind] = {}
        self._gradients: dict[str, Tensor | None] = {}
        """Gradient [...] of each parameter by name; None for a parameter without one. Graphs write them."""
        self._zeros: dict[str, Tensor] = {}
        """By parameter that had no gradient before its first step: zeros [...] in place of one."""
        self._unchecked: _StepKind | None = None
        self._passed = 0

    @property
    def written(self) -> frozenset[int]:
        """Ids of the gradients that a replay makes anew."""
        effects = (kind.effects for kind in self._kinds.values() if kind.effects is not None)
        return frozenset(id(gradient) for each in effects for _, gradient in each.aside)

    @property
    def replays(self) -> int:
        """How many steps were replayed so far."""
        return sum(kind.replays for kind in self._kinds.values())

    def told(self) -> str:
        """In words, how many steps are graphs."""
        captured = sum(kind.captured is not None for kind in self._kinds.values())
        passed = f"; {self._passed} steps of further kinds ran without" if self._passed else ""
        return f"graphs: {captured} of whole steps, replayed {self.replays} times{passed}"

    def serves(self, call: PipelineCall) -> bool:
        """Whether a call may run as a graph: it trains, is no repeat, and asks nothing of single instructions."""
        asks = call.outputs or call.trace or call.profile or call.snapshot
        return call.training and not call.again and not asks

    def run(
        self,
        name: str,
        executors: Sequence[Executor],
        parts: Any,
        begin: Callable[[Any], None],
        go: Callable[[Any], None],
    ) -> None:
        """Run a step. name: its kind, equal on all ranks. parts: batch and targets [...] of the executors.

        begin: makes the executors ready. go: runs them.
        """
        self._refuse_place()
        if name not in self._kinds and len(self._kinds) == MOST:
            self._passed += 1
            begin(parts)
            go(parts)
            return
        kind = self._kinds.setdefault(name, _StepKind(executors))
        self._place_gradients()
        if kind.captured is not None:
            self._replay(kind, parts)
        elif len(kind.recordings) < EAGER:
            copies = _copies(parts)
            with step_recording() as taken, self._beside():
                begin(copies)
                go(copies)
            self._keep_gradients(taken)
            kind.recordings.append(taken)
            self._unchecked = kind
        else:
            self._capture(kind, parts, begin, go)

    def check(self) -> None:
        """Raise `GraphRefused`, on every rank alike, if a graph cannot hold the step that has run. A collective."""
        kind, self._unchecked = self._unchecked, None
        if kind is None or len(kind.recordings) == 1:
            return
        control = self._assembly.guard.control
        # A tape holds what autograd would else write into, so that a few launches are others.
        alone = len(kind.recordings) < EAGER or (kind.captured is not None and kind.captured.ran)
        report: CaptureReport = capture_report(*kind.recordings[-1 if alone else -2 :])
        mine = [control.name, str(report)] if report.findings else None
        if kind.captured is not None:
            kind.recordings.clear()
        refused = control.fold("checking that a graph can hold the step", mine, _first)
        if refused is not None:
            self._kinds.clear()
            raise GraphRefused(
                f'graphs="step", and a graph cannot hold the step of {refused[0]}:\n{refused[1]}',
                "mend what is named, or leave graphs out",
            )

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Runs on the stream of graphs, to which caches of the first steps then belong."""
        device = self._device
        device.record().wait(self._stream)
        with device.on(self._stream):
            yield
        device.record(self._stream).wait(device.current())

    def _refuse_place(self) -> None:
        if self._assembly.shards is not None:
            raise RuntimeFault('graphs="step" and FSDP exclude each other', "leave one of the two out")
        if self._device.is_captured():
            raise RuntimeFault('graphs="step" inside of a graph of yours', "call `step` outside, or leave graphs out")
        if self._device.current() != self._begun:
            where = 'graphs="step" inside of a stream of yours: gradients belong to that of the pipeline'
            raise RuntimeFault(where, "build the pipeline and call `step` on one stream")

    def _capture(self, kind: _StepKind, parts: Any, begin: OnParts, go: OnParts) -> None:
        kind.inputs = _copies(parts)
        await_event(self._device, self._device.record())
        self._assembly.guard.control.fold("capturing the step", None, _first)
        begin(kind.inputs)
        with step_recording() as taken:
            captured = self._device.captured(lambda: go(kind.inputs), self._pool, self._stream, whole=True)
        if not captured.ran:
            captured.replay()
            self._passed_whole(kind)
        kind.captured, kind.held = captured, list(taken.outside.values())
        kind.addresses = self._addresses()
        kind.recordings.append(taken)
        self._unchecked = kind
        kind.effects = _GraphEffects(
            dict(self._assembly.head.formed),
            [LayerCounts.of(layer) for layer in self._layers],
            [dict(layer.planner.flags) for layer in self._layers],
            [executor.registers.probes for executor in kind.executors],
            [(each, each.grad) for each in self._aside if each.grad is not None],
        )
        self._give(kind.effects, kind.executors)

    def _replay(self, kind: _StepKind, parts: Any) -> None:
        if (addresses := self._addresses()) != kind.addresses:
            moved = next(name for name, place in addresses.items() if kind.addresses.get(name) != place)
            raise RuntimeFault(
                f"`{moved}` has moved, or was frozen or trained, since a graph of the step was captured",
                "write into parameters and buffers in place (`copy_`), or build a new Pipeline",
            )
        with torch.no_grad():
            for static, value in zip(pytree.tree_leaves(kind.inputs), pytree.tree_leaves(parts), strict=True):
                if isinstance(static, Tensor):
                    static.copy_(value)
        assert kind.captured is not None
        assert kind.effects is not None
        kind.captured.replay()
        kind.replays += 1
        self._passed_whole(kind)
        self._give(kind.effects, kind.executors)

    def _passed_whole(self, kind: _StepKind) -> None:
        """Mark how far the device has come: events inside of a graph cannot be asked."""
        for executor in kind.executors:
            if executor.places is not None:
                executor.places.passed_whole()

    def _give(self, effects: _GraphEffects, executors: Sequence[Executor]) -> None:
        """Let Python see what a replay has computed. Counts are copied: later steps add to them."""
        self._assembly.head.formed = dict(effects.formed)
        for layer, counts, flags in zip(self._layers, effects.counts, effects.flags, strict=True):
            counts.copied().put(layer)
            layer.planner.flags = dict(flags)
        for executor, probes in zip(executors, effects.probes, strict=True):
            executor.registers.probes = probes
        for parameter, gradient in effects.aside:
            parameter.grad = gradient

    def _addresses(self) -> dict[str, tuple[int, bool]]:
        """Where parameters and buffers of the stages here lie, and whether they are trained, by name."""
        return {
            f"stage {stage.index}: {name}": (each.data_ptr(), each.requires_grad)
            for stage in self._assembly.held()
            for named in (stage.module.named_parameters(), stage.module.named_buffers())
            for name, each in named
        }

    @torch.no_grad()
    def _place_gradients(self) -> None:
        """Bring gradients back to their memory: zeros where they were dropped, values where they lie elsewhere."""
        for name, parameter in self._own.items():
            kept, now = self._gradients.get(name), parameter.grad
            if not parameter.requires_grad or (name in self._gradients and kept is None) or (kept is now is not None):
                continue
            if kept is not None:
                parameter.grad = kept.zero_() if now is None else kept.copy_(now)
            elif now is None:
                parameter.grad = self._zeros[name] = torch.zeros_like(parameter)

    def _keep_gradients(self, taken: StepRecording) -> None:
        """Keep the memory of gradients behind a step. A parameter that got none has none, as without graphs."""
        for name, parameter in self._own.items():
            if name in self._gradients or not parameter.requires_grad:
                continue
            zeros = self._zeros.pop(name, None)
            if zeros is not None and parameter.grad is zeros and zeros.untyped_storage()._cdata not in taken.outside:
                parameter.grad = None  # nothing was added
            self._gradients[name] = parameter.grad


def _copies(parts: Any) -> Any:
    """Batch and targets [...] in memory of their own."""
    return pytree.tree_map_only(Tensor, lambda each: each.detach().clone(), parts)


def _first(everyone: Sequence[Any]) -> Any:
    """The first finding of any rank."""
    return next((each for each in everyone if each is not None), None)
