"""What all steps of a stage share: the module, the graph, and the states of microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from schedc.cell.graph import StageShape
from schedc.cell.slices import JOINT, sliced
from schedc.ir.plan import Level, Recompute
from schedc_runtime.errors import StageError
from schedc_runtime.partition.boundary import Boundary, SlicedBoundary
from schedc_runtime.partition.recorded_stage import RecordedStage
from schedc_runtime.random_numbers.interception import session
from schedc_runtime.random_numbers.numbering import Numbering
from schedc_runtime.ranks.exchange import RoutingLayer
from schedc_runtime.recompute.layers import unmark_layers
from schedc_runtime.recompute.levels import Recomputation, check_repeated, draws, region_paths
from schedc_runtime.recompute.levels import install as install_regions
from schedc_runtime.recompute.levels import uninstall as uninstall_regions
from schedc_runtime.recompute.random_state import gpus
from schedc_runtime.recompute.whole_stage import StageCheckpoints
from schedc_runtime.segments.captured import CapturedSegments
from schedc_runtime.segments.fx_trace import Traces
from schedc_runtime.segments.graph import Communication, Segment, StageGraph, stage_graph
from schedc_runtime.stage.bound_shape import BoundShape
from schedc_runtime.stage.carries import Carries
from schedc_runtime.stage.hooks import has_hooks
from schedc_runtime.stage.in_flight import MicrobatchState, WholeRecord
from schedc_runtime.stage.module_tree import ModuleTree
from schedc_runtime.stage.offloaded import OffloadedStage
from schedc_runtime.stage.split import SplitBackward, is_late

LossFunction = Callable[[Any, Any], Tensor]
"""loss_fn(output of the model, target) -> scalar, for one microbatch."""
FuseSegment = Callable[[str, nn.Module, str], Callable[..., tuple[Any, ...]]]
"""(segment, calls between its modules, name by which they draw) -> what runs in their place."""

NOTHING = nullcontext()
"""Wraps a forward that needs no context. One for all: making one costs 0.25 us."""


class StageBase(OffloadedStage):
    """A stage module as a graph, with the states of its microbatches in flight. See `Stage`."""

    shapes: Sequence[BoundShape] = ()
    """[M] what the stage is bound to by microbatch, in a step whose microbatches have several shapes."""
    _shape: BoundShape | None = None
    """The shape that was taken last; None where `bind` has been called since."""
    numbering: Numbering | None = None
    """Sets the random numbers of each forward by name, in a step that numbers them so."""
    carries: Carries | None = None
    """What segments of a sequence leave here for those behind them; None where sequences are whole."""
    _input: Boundary
    _output: Boundary
    _last_gradient: tuple[Any, Tensor] | None = None
    """The last loss scale with the loss's dtype, device and class, and the gradient of the loss that they gave."""
    _recomputes_ahead: bool = False
    """Whether the program has Rs of this stage."""
    _defers: bool = False
    """Whether there was an I. Only split backwards use the marks that forwards take."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        *,
        inputs: int | None = None,
        blocks: Sequence[str] = (),
        loss_fn: LossFunction | None = None,
        slices: int = 1,
        in_order: bool = False,
        early: bool = False,
    ) -> None:
        super().__init__(module, index)
        self.stages, self.blocks, self.slices = stages, tuple(blocks), slices
        self.is_cut = inputs is not None
        """Whether a microbatch runs on a graph of segments and exchanges. Otherwise the stage is one node."""
        self.loss_fn = loss_fn if index == stages - 1 or early else None
        self.early = early
        """Whether the stage forms the loss of an output and passes values on: its module gives an `EarlyOutput`."""
        self.losses: dict[int, Tensor] = {}
        """Loss of each microbatch on a stage that forms one, detached and not scaled. `take_losses` clears it."""
        self._states: dict[int, MicrobatchState] = {}
        self._whole: dict[int, WholeRecord] = {}
        """What the backward needs, by number of the slice, and of a stage of one node by microbatch."""
        self._split = SplitBackward()
        self._late = has_hooks if in_order else is_late
        self._memory = self._memory_with_r = Recomputation(Recompute(), None, False)
        """The recomputation of microbatches, and of those with an R."""
        self._checkpoints = StageCheckpoints(module)
        self._traces: Traces = {}
        self.graph: StageGraph = stage_graph(module, inputs, self.blocks, self._traces)
        """The graph of one slice."""
        self.graph_with_r: StageGraph = self.graph
        """The graph of microbatches with an R. It may recompute more nodes than the plan says."""
        self._recorded = module.current.graph if self.is_cut and isinstance(module, RecordedStage) else None
        self._graphs: WeakKeyDictionary[Any, StageGraph] = WeakKeyDictionary()
        """The graph in segments of each recorded graph of the stage, as long as that one is kept."""
        if self._recorded is not None:
            self._graphs[self._recorded] = self.graph
        self.captures: CapturedSegments | None = None
        self._fuse: FuseSegment | None = None
        """What replays the launches of segments, and what fuses the calls between their modules; None: as they are."""
        self._waiting: dict[int, set[int]] = {}
        """By number of the slice: nodes whose weight gradients wait for other nodes with the same parameter."""
        self._returning: dict[int, dict[int, tuple[Any, Any]]] = {}
        """By number of the slice and node: the route of an exchange that returns gradients in W, and the exchange in
        flight, None before its start."""

    @property
    def shape(self) -> StageShape | None:
        """The graph of a microbatch, as plain data; None where the stage is one node."""
        return sliced(self.graph.shape, self.slices) if self.is_cut else None

    @property
    def shape_with_r(self) -> StageShape | None:
        """The graph of microbatches with an R, as plain data."""
        return sliced(self.graph_with_r.shape, self.slices) if self.is_cut else None

    @cached_property
    def _place(self) -> list[tuple[int, int]]:
        """By node of `shape`: the node of ``graph``, and the slice; -1 for one that all slices share."""
        shared = [self.slices > 1 and node.role in JOINT for node in self.graph.shape.nodes]
        return [(node, n) for node, joint in enumerate(shared) for n in ((-1,) if joint else range(self.slices))]

    @property
    def _own_shape(self) -> StageShape | None:
        """The graph of a slice, as plain data."""
        return self.graph.shape if self.is_cut else None

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Microbatches whose forward has run and whose backward (B or I) has not."""
        return tuple(sorted({number // self.slices for number in (*self._states, *self._whole, *self.kept)}))

    @property
    def pending(self) -> tuple[int, ...]:
        """Microbatches whose weight gradients are deferred."""
        nodes = len(self.graph.nodes) * self.slices
        return tuple(sorted({key // nodes if key >= 0 else -1 - key for key in self._split.pending}))

    def bind(self, input: Boundary, output: Boundary, parts: tuple[Boundary, Boundary] | None = None) -> None:
        """Set the boundaries on both sides, for the input signature of the next microbatches.

        parts: the boundaries of a slice, where a microbatch has several.
        """
        self.check_empty()
        self._shape = None
        self._input, self._output = input, output
        part_input, part_output = parts or (input, output)
        self._entry = SlicedBoundary.of(input, part_input, self.slices)
        self._exit = SlicedBoundary.of(output, part_output, self.slices)
        self.follow()
        if self.is_cut and input.tree.num_children != self.graph.inputs:
            raise StageError(
                f"stage {self.index} was traced for {self.graph.inputs} inputs, but {input.tree.num_children} enter it"
            )

    def take_shape(self, microbatch: int) -> None:
        """Be bound to the shape of a microbatch in `shapes`, which runs next."""
        shape = self.shapes[microbatch]
        if shape is not self._shape:
            shape.enter(self)
            self._shape = shape
        if shape.slot is not None:  # another copy of the stage may have taken another
            shape.slot.code = shape.code

    def follow(self) -> None:
        """Take the graph of the current code, which may differ with the input signature."""
        module = self.module
        if not self.is_cut or not isinstance(module, RecordedStage) or (code := module.current).graph is self._recorded:
            return
        graph = self._graphs.get(code.graph)
        if graph is None:
            graph = stage_graph(module, len(code.shapes), self.blocks, self._traces)
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

    def set_recomputation(self, plan: Recompute, *, count: bool = False) -> None:
        """Recompute what ``plan`` says. count: count the bytes that are held."""
        self.check_empty()
        layers = self._layers() if self.is_cut and plan.layers else ()
        parts = self._own_shape, draws(self.module), layers
        self._memory = self._memory_with_r = Recomputation(plan, *parts, count=count)
        self.graph = self.graph_with_r = replace(self.graph, recomputed=self._memory.recomputed)
        self.install_regions(plan)
        if self._recomputes_ahead:
            self.prepare_recompute()

    def install_regions(self, plan: Recompute) -> None:
        """Make regions of the module's parts, which know their layer where ``plan`` has levels of layers.

        Raises `StageError` for levels of more layers than the stage has, and as `check_repeated`.
        """
        unmark_layers(self.module)
        check_repeated(self.module, self.blocks, plan, self.index)
        install_regions(self.module, self.blocks if plan.level >= Level.LAYER else ())
        if plan.layers:
            from schedc_runtime.layer_levels import mark_layers

            mark_layers(self.module, self.blocks, sum(run.layers for run in plan.layers), self.index)

    def _layers(self) -> tuple[int, ...]:
        """[nodes] the layer of each, where layers have levels of their own."""
        from schedc_runtime.layer_levels import layers_of_graph

        return layers_of_graph(self.graph, self.blocks)

    def prepare_recompute(self) -> None:
        """Prepare for forwards with ``recompute_later``: the program has Rs of this stage.

        Such a forward frees what the level of `set_recomputation` frees. Without a level it frees the whole stage; its
        R sends the exchanges a second time. A stage with a `MoELayer` then takes the level `full`.
        """
        self._recomputes_ahead = True
        if self._memory.level is not Level.NONE or not self.is_cut:
            return
        if any(isinstance(part, RoutingLayer) for part in self.module.modules()):
            self._memory_with_r = Recomputation(Recompute(Level.FULL), self.graph.shape, self._draws)
            self.graph_with_r = replace(self.graph, recomputed=self._memory_with_r.recomputed)
            install_regions(self.module)
        else:
            self.graph_with_r = replace(self.graph, recomputed=dict.fromkeys(range(len(self.graph.nodes)), 1.0))

    @property
    def recomputes_whole(self) -> bool:
        """Whether an R runs the whole forward a second time, because no level was set."""
        return self._memory_with_r.level is Level.NONE

    @property
    def recomputation(self) -> Recomputation:
        """The recomputation of this stage."""
        return self._memory

    def fuse_segments(self, fuse: FuseSegment | None) -> None:
        """Let calls between the modules of each segment run as ``fuse`` says; None: as the model has them.

        A stage of one node has no such calls.
        """
        if not self.is_cut:
            return
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
        """Names and roles of the segments, by number; none where the stage is one node."""
        nodes = () if self._own_shape is None else self._own_shape.nodes
        return {n: node.name for n, node in enumerate(nodes)}, {n: node.role for n, node in enumerate(nodes)}

    def drawing(self, number: int, node: int = -1) -> AbstractContextManager[None]:
        """Wraps a forward of a slice, or of one node of it, which may draw random numbers."""
        return NOTHING if self.numbering is None else self.numbering.forward(number, node)

    def take_losses(self) -> dict[int, Tensor]:
        """Loss of each microbatch since the last call, by microbatch: scalars, without the loss scale."""
        losses, self.losses = self.losses, {}
        return losses

    def end_step(self) -> None:
        """A step is over: decide what the next step recomputes."""
        if self.offload is not None:
            self.offload.end_step()
        if self._memory.adaptive is not None:
            self._memory.adaptive.end_step()
        if self.carries is not None:
            self.carries.end()

    def check_empty(self) -> None:
        """Raise `StageError` unless every microbatch has run F, B or I, and W."""
        if self._states or self._whole or self.kept or self._split.pending or self._returning:
            behind = sorted({*self.pending, *(number // self.slices for number in self._returning)})
            raise StageError(
                f"stage {self.index} still holds microbatches {list(self.in_flight)} (no backward yet) and"
                f" {behind} (no weight gradients yet)",
                "finish the step, or call reset() to give it up",
            )

    def reset(self) -> None:
        """Forget every microbatch in flight, after a step that failed."""
        for of_microbatches in (
            self._states,
            self._whole,
            self.kept,
            self._split.pending,
            self._waiting,
            self._returning,
        ):
            of_microbatches.clear()
        self.losses = {}
        self._reset_copies()
        if self.captures is not None:
            self.captures.reset()
        if self.carries is not None:
            self.carries.reset()

    def release(self) -> None:
        """Restore the module as it was before this stage. The stage cannot be used afterwards."""
        self.reset()
        unmark_layers(self.module)
        self._release_copies()
        uninstall_regions(self.module)

    @cached_property
    def tree(self) -> ModuleTree:
        """The parts of the module as they are now."""
        return ModuleTree(self.module)

    @cached_property
    def _draws(self) -> bool:
        return draws(self.module)

    @cached_property
    def _late_in(self) -> dict[int, Callable[[nn.Parameter], bool]]:
        """By node with a W: whether W adds a parameter's gradient. W adds those of parameters with several nodes."""

        def late(shared: frozenset[int], parameter: nn.Parameter) -> bool:
            return id(parameter) in shared or is_late(parameter)

        shared = {node: frozenset(map(id, self.graph.shared_parameters(node))) for node in self.graph.shape.weights}
        return {node: partial(late, others) for node, others in shared.items()}

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
        """What the backward of a slice needs."""
        if (state := self._states.get(number)) is None:
            raise self._not_forwarded(number)
        return state

    def _not_forwarded(self, number: int) -> StageError:
        microbatch = number // self.slices
        if number in self.kept:
            return StageError(f"stage {self.index}: the backward of microbatch {microbatch} comes before its R")
        return StageError(f"stage {self.index}: microbatch {microbatch} has not been forwarded")

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
