"""The microbatches in flight through a segmented stage, and what all of its micro-steps look things up in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from schedc.cell.graph import StageShape
from schedc.plan.values import Level, Recompute
from schedc_runtime.errors import StageError
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.partition.boundary import Boundary
from schedc_runtime.recompute.levels import Recomputation, draws, install
from schedc_runtime.recompute.random_state import gpus
from schedc_runtime.segments.graph import Communication, Segment, StageGraph, stage_graph
from schedc_runtime.segments.in_flight import MicrobatchState
from schedc_runtime.stage.stage import LossFunction, Stage


class SegmentedBase(Stage):
    """A stage as a graph, and its microbatches in flight by number; see `SegmentedStage`."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        *,
        inputs: int,
        blocks: Sequence[str] = (),
        loss_fn: LossFunction | None = None,
    ) -> None:
        # Weight gradients are steps of their own in every cell, so that they are always put aside.
        super().__init__(module, index, stages, loss_fn=loss_fn, deferring=True)
        self.graph: StageGraph = stage_graph(module, inputs, blocks)
        self.graph_with_r: StageGraph = self.graph
        """The graph of microbatches with an R, which may do more of its nodes once more than the plan says."""
        self._memory_with_r = self._memory
        """What is recomputed of these."""
        self._states: dict[int, MicrobatchState] = {}
        self._asked: dict[int, set[int]] = {}
        """By microbatch: nodes whose weight gradients were asked for and wait for others with the same parameter."""

    @property
    def shape(self) -> StageShape:
        return self.graph.shape

    @property
    def in_flight(self) -> tuple[int, ...]:
        return tuple(sorted({*self._states, *self.kept}))

    @property
    def recomputes_whole(self) -> bool:
        return self._memory_with_r.level is Level.NONE

    @property
    def pending(self) -> tuple[int, ...]:
        return tuple(sorted({key // len(self.graph.nodes) for key in self._sink.pending}))

    def set_recomputation(self, plan: Recompute, *, count: bool = False) -> None:
        self.check_empty()
        self._memory = Recomputation(plan, self.shape, self._draws, count=count)
        self.graph = replace(self.graph, recomputed=self._memory.recomputed)
        self._memory_with_r, self.graph_with_r = self._memory, self.graph
        install(self.module)

    def prepare_recompute(self) -> None:
        if self._memory.level is not Level.NONE:
            return
        if any(moe_layers(self.module)):
            self._memory_with_r = Recomputation(Recompute(Level.FULL), self.shape, self._draws)
            self.graph_with_r = replace(self.graph, recomputed=self._memory_with_r.recomputed)
            install(self.module)
        else:
            self.graph_with_r = replace(self.graph, recomputed=dict.fromkeys(range(len(self.graph.nodes)), 1.0))

    def reset(self) -> None:
        super().reset()
        self._states.clear()
        self._asked.clear()

    @cached_property
    def _draws(self) -> bool:
        return draws(self.module)

    @cached_property
    def _late(self) -> dict[int, tuple[tuple[nn.Parameter, ...], tuple[nn.Parameter, ...]]]:
        """By node with a step for weight gradients: its parameters that other nodes have too, and its own vectors."""
        found = {}
        for node in self.shape.weights:
            shared = self.graph.shared_parameters(node)
            others = set(map(id, shared))
            found[node] = shared, tuple(p for p in self.graph.parameters(node) if p.dim() <= 1 and id(p) not in others)
        return found

    def bind(self, input: Boundary, output: Boundary) -> None:
        super().bind(input, output)
        if input.tree.num_children != self.graph.inputs:
            raise StageError(
                f"stage {self.index} was traced for {self.graph.inputs} inputs, but {input.tree.num_children} enter it"
            )

    def _key(self, microbatch: int, node: int) -> int:
        """Under which the weight sink keeps the work of a node."""
        return microbatch * len(self.graph.nodes) + node

    def _state(self, microbatch: int) -> MicrobatchState:
        state = self._states.get(microbatch)
        if state is None:
            self._check_kept(microbatch)
            raise StageError(f"stage {self.index}: microbatch {microbatch} has not been forwarded")
        return state

    def _segment(self, node: int) -> Segment:
        found = self.graph.nodes[node]
        if not isinstance(found, Segment):
            raise StageError(f"stage {self.index}: {found.name} is an exchange: it is started and waited for")
        return found

    def _communication(self, node: int) -> Communication:
        found = self.graph.nodes[node]
        if not isinstance(found, Communication):
            raise StageError(f"stage {self.index}: {found.name} is no exchange: it is run")
        return found

    @contextmanager
    def _random(self, state: MicrobatchState, node: int) -> Iterator[None]:
        """Random numbers of a segment's own, which do not depend on what ran before it."""
        if not (self.module.training and self._draws):
            yield
            return
        with torch.random.fork_rng(gpus([state.device])):
            torch.manual_seed(state.seed + node)
            yield
