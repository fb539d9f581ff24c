"""What all micro-steps of a segmented stage share: its graph and the states of its microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from schedc.cell.graph import StageShape
from schedc.cell.slices import JOINT, sliced
from schedc.ir.plan import Level, Recompute
from schedc_runtime.errors import StageError
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.partition.recorded_stage import RecordedStage
from schedc_runtime.partition.sliced_boundary import SlicedBoundary
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.ranks.exchange import RoutingLayer
from schedc_runtime.recompute.levels import Recomputation, draws, install, region_paths
from schedc_runtime.recompute.random_state import gpus
from schedc_runtime.segments.captured import CapturedSegments
from schedc_runtime.segments.fx_trace import Traces
from schedc_runtime.segments.graph import Communication, Segment, StageGraph, stage_graph
from schedc_runtime.segments.in_flight import MicrobatchState
from schedc_runtime.stage.split import is_late
from schedc_runtime.stage.stage import FuseSegment, LossFunction, Stage


class SegmentedBase(Stage):
    """A stage as a graph of segments, with the states of its microbatches in flight. See `SegmentedStage`."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        *,
        inputs: int,
        blocks: Sequence[str] = (),
        loss_fn: LossFunction | None = None,
        slices: int = 1,
    ) -> None:
        super().__init__(module, index, stages, blocks=blocks, loss_fn=loss_fn)
        self.slices = slices
        self._traces: Traces = {}
        self.graph: StageGraph = stage_graph(module, inputs, blocks, self._traces)
        """The graph of one slice."""
        self._place: list[tuple[int, int]] = []
        """By node of `shape`: the node of ``graph``, and the slice; -1 for one that all slices share."""
        for own, node in enumerate(self.graph.shape.nodes):
            shared = slices > 1 and node.role in JOINT
            self._place += [(own, -1)] if shared else [(own, part) for part in range(slices)]
        self.graph_with_r: StageGraph = self.graph
        """The graph of microbatches with an R. It may recompute more nodes than the plan says."""
        self._recorded = module.current.graph if isinstance(module, RecordedStage) else None
        self._graphs: WeakKeyDictionary[Any, StageGraph] = WeakKeyDictionary()
        """The graph in segments of each recorded graph of the stage, as long as that one is kept."""
        if self._recorded is not None:
            self._graphs[self._recorded] = self.graph
        self._states: dict[int, MicrobatchState] = {}
        self.captures: CapturedSegments | None = None
        """The segments whose launches are replayed; None where all are launched as ever."""
        self._fuse: FuseSegment | None = None
        """What fuses the calls between the modules of a segment; None where the model's own code runs."""
        self._waiting: dict[int, set[int]] = {}
        """By number of the slice: nodes whose weight gradients wait for other nodes with the same parameter."""

    @property
    def shape(self) -> StageShape:
        return sliced(self.graph.shape, self.slices)

    @property
    def shape_with_r(self) -> StageShape:
        return sliced(self.graph_with_r.shape, self.slices)

    @property
    def pending(self) -> tuple[int, ...]:
        nodes = len(self.graph.nodes) * self.slices
        return tuple(sorted({key // nodes if key >= 0 else -1 - key for key in self._split.pending}))

    @property
    def _own_shape(self) -> StageShape:
        return self.graph.shape

    def set_recomputation(self, plan: Recompute, *, count: bool = False) -> None:
        super().set_recomputation(plan, count=count)
        self.graph = self.graph_with_r = replace(self.graph, recomputed=self._memory.recomputed)

    def fuse_segments(self, fuse: FuseSegment | None) -> None:
        self._fuse = fuse
        for graph in {id(graph): graph for graph in (self.graph, *self._graphs.values())}.values():
            self._fuse_in(graph)

    def _fuse_in(self, graph: StageGraph) -> None:
        level = self.recomputation.level
        opaque = region_paths(self.module, level) if level >= Level.LAYER else ()
        for node in graph.nodes:
            if isinstance(node, Segment):
                node.run.fuse(self.module, self._fuse and partial(self._fuse, node.name), opaque)

    def _node_names(self) -> tuple[dict[int, str], dict[int, str]]:
        shape = self.graph.shape
        return dict(enumerate(shape.names)), {number: node.role for number, node in enumerate(shape.nodes)}

    def prepare_recompute(self) -> None:
        if self._memory.level is not Level.NONE:
            return
        if any(isinstance(part, RoutingLayer) for part in self.module.modules()):
            self._memory_with_r = Recomputation(Recompute(Level.FULL), self.graph.shape, self._draws)
            self.graph_with_r = replace(self.graph, recomputed=self._memory_with_r.recomputed)
            install(self.module)
        else:
            self.graph_with_r = replace(self.graph, recomputed=dict.fromkeys(range(len(self.graph.nodes)), 1.0))

    def reset(self) -> None:
        super().reset()
        if self.captures is not None:
            self.captures.reset()
        self._waiting.clear()

    @cached_property
    def _draws(self) -> bool:
        return draws(self.module)

    @cached_property
    def _late_in(self) -> dict[int, Callable[[nn.Parameter], bool]]:
        """By node with a W: whether W adds a parameter's gradient. It does for those that several nodes use."""

        def late(shared: frozenset[int], parameter: nn.Parameter) -> bool:
            return id(parameter) in shared or is_late(parameter)

        shared = {node: frozenset(map(id, self.graph.shared_parameters(node))) for node in self.graph.shape.weights}
        return {node: partial(late, others) for node, others in shared.items()}

    def bind(self, input: Boundary, output: Boundary, parts: tuple[Boundary, Boundary] | None = None) -> None:
        """As of a `Stage`. parts: the boundaries of a slice, where a microbatch has several."""
        super().bind(input, output)
        part_input, part_output = parts or (input, output)
        self._entry = SlicedBoundary.of(input, part_input, self.slices)
        self._exit = SlicedBoundary.of(output, part_output, self.slices)
        self.follow()
        if input.tree.num_children != self.graph.inputs:
            raise StageError(
                f"stage {self.index} was traced for {self.graph.inputs} inputs, but {input.tree.num_children} enter it"
            )

    def follow(self) -> None:
        """Take the graph of the current code, which may differ with the input signature."""
        if not isinstance(self.module, RecordedStage) or (code := self.module.current).graph is self._recorded:
            return
        graph = self._graphs.get(code.graph)
        if graph is None:
            graph = stage_graph(self.module, len(code.shapes), self.blocks, self._traces)
            self._graphs[code.graph] = graph
            if self._fuse is not None:
                self._fuse_in(graph)
        if graph.shape.nodes != replace(self.graph, recomputed={}).shape.nodes:
            raise StageError(
                f"stage {self.index} has other segments for this batch than for the example that its cells were"
                " ordered for",
                "give an example like the batches: Pipeline(..., example=batch)",
            )
        self._recorded = code.graph
        self.graph = replace(graph, recomputed=self.graph.recomputed)
        self.graph_with_r = replace(graph, recomputed=self.graph_with_r.recomputed)
        self.__dict__.pop("_late_in", None)

    def _key(self, number: int, node: int) -> int:
        """The key under which the weight sink keeps the work of a node of ``graph``."""
        return number * len(self.graph.nodes) + node

    def _at(self, microbatch: int, node: int) -> tuple[int, int]:
        """The number of the slice that runs a node of `shape`, and its node of ``graph``."""
        own, part = self._place[node]
        if part < 0:
            raise StageError(f"stage {self.index}: {self.graph.nodes[own].name} is shared by all slices")
        return microbatch * self.slices + part, own

    def _sharing(self, microbatch: int, node: int) -> tuple[list[MicrobatchState], int]:
        """The states of the slices that share an exchange of `shape`, and its node of ``graph``."""
        own, part = self._place[node]
        numbers = self.numbers(microbatch)
        return [self._state(number) for number in (numbers if part < 0 else numbers[part : part + 1])], own

    def _state(self, number: int) -> MicrobatchState:
        state: MicrobatchState = super()._state(number)
        return state

    def _segment(self, node: int) -> Segment:
        segment = self.graph.nodes[node]
        if not isinstance(segment, Segment):
            raise StageError(f"stage {self.index}: {segment.name} is an exchange: it is started and waited for")
        return segment

    def _communication(self, node: int) -> Communication:
        communication = self.graph.nodes[node]
        if not isinstance(communication, Communication):
            raise StageError(f"stage {self.index}: {communication.name} is no exchange: it is run")
        return communication

    @contextmanager
    def _random(self, state: MicrobatchState, node: int) -> Iterator[None]:
        """Gives a segment random numbers of its own, which do not depend on the steps before it."""
        if session() is not None or not (self.module.training and self._draws):
            with self.drawing(state.number, node):
                yield
            return
        with torch.random.fork_rng(gpus([state.device])):
            torch.manual_seed(state.seed + node)
            yield
