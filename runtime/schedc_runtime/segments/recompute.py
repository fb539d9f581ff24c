"""The nodes of a microbatch that run once more before their backward: what is sent again, and what is worked out ahead.

    forward    permute -> [dispatch] -> experts      the rows that arrive are not held
    again      permute -> [dispatch] -> experts      decisions are those of the first time, so is the route

All ranks of an expert group do it alike: the steps are part of the cell program, and a decision to leave them out is
made from what all ranks know.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc_runtime.errors import StageError
from schedc_runtime.recompute.levels import MicrobatchRecorder
from schedc_runtime.recompute.regions import Producer, RegionInner, RegionOutput, SavedTensor, repeat, value_of
from schedc_runtime.segments.graph import Communication, Segment, StageGraph


class SegmentRecompute:
    """Of one microbatch. values: made once more and yet to be used, by number."""

    def __init__(self, graph: StageGraph, recorder: MicrobatchRecorder) -> None:
        self.graph, self.recorder = graph, recorder
        self.pending: dict[int, Any] = {}
        self.held: dict[int, Any] = {}
        """Notes of values that enter what is repeated."""
        self._values: dict[int, Any] = {}
        self._uses: dict[int, int] = {}
        self._sources: dict[int, weakref.ref[Producer]] = {}

    def skips(self, node: int) -> bool:
        """Whether this microbatch holds what the node would make once more."""
        return not self.recorder.runs(self.graph.shape.nodes[node])

    def forwarded(self, node: int, values: Iterable[tuple[int, Any]]) -> None:
        """Hold what a segment took that will be repeated as a whole."""
        if node not in self.recorder.plan.replayed or self.skips(node):
            return
        for number, value in values:
            if self.graph.maker.get(number) not in self.graph.recomputed:
                self.held[number] = pytree.tree_map_only(Tensor, self.recorder.note, value)

    def arrived(self, node: int, given: Sequence[Tensor]) -> None:
        """What an exchange brought is not held, if it will be sent once more."""
        moving = self._communication(node)
        if node not in self.graph.recomputed or self.skips(node):
            return
        if any(self.graph.maker.get(value) not in self.graph.recomputed for value in moving.takes[1:]):
            return  # Rows that others hold as well, and that may not even have been copied on the way.
        source = Producer(moving.name)
        self._sources[node] = weakref.ref(source)
        for element, tensor in enumerate(given):
            self.recorder.comes_from(source, element, tensor)

    def run(self, module: nn.Module, node: int, random: AbstractContextManager[None]) -> None:
        """A segment once more: what its backward needs, or what is to be sent."""
        if self.skips(node):
            return
        if node not in self.recorder.plan.replayed:
            self.recorder.fill(node)
            return
        segment = self.graph.nodes[node]
        assert isinstance(segment, Segment)
        taken = [self._take(value) for value in segment.takes]
        with torch.no_grad(), random:
            made = repeat(self.recorder.kept[node], segment.run, module, *taken)
        self._make(zip(segment.gives, made, strict=True))

    def start(self, node: int) -> None:
        if self.skips(node):
            return
        moving = self._communication(node)
        taken: list[Any] = [None if value < 0 else self._take(value) for value in moving.takes]
        route, payload = taken[0], taken[1:]
        with torch.no_grad():
            self.pending[node] = moving.exchange.start(route, *payload)

    def ready(self, node: int) -> bool:
        return node not in self.pending or self._communication(node).exchange.ready(self.pending[node])

    def wait(self, node: int) -> None:
        if self.skips(node):
            return
        moving = self._communication(node)
        if node not in self.pending:
            raise StageError(f"{moving.name} was not started once more")
        given = moving.exchange.finish(self.pending.pop(node))
        if (found := self._sources.get(node)) is not None and (source := found()) is not None:
            source.results = tuple(given)
        self._make((value, given[element]) for value, element in zip(moving.gives, moving.elements, strict=True))

    @property
    def made(self) -> list[Any]:
        """What is there once more: brought by exchanges, or yet to be sent."""
        sources = [found for weak in self._sources.values() if (found := weak()) is not None]
        return [*self._values.values(), *(x.results for x in sources)]

    def _make(self, made: Iterable[tuple[int, Any]]) -> None:
        for number, value in made:
            users = [at for at in self.graph.consumers[number] if at in self._senders]
            if users:
                self._values[number], self._uses[number] = value, len(users)

    @property
    def _senders(self) -> frozenset[int]:
        """The nodes that take values once more: not the segments whose regions find their own way."""
        return frozenset(
            at for at in self.graph.recomputed
            if at in self.recorder.plan.replayed or isinstance(self.graph.nodes[at], Communication)
        )  # fmt: skip

    def _take(self, number: int) -> Any:
        if number in self.held:
            return pytree.tree_map(_restored, self.held[number], is_leaf=_is_note)
        if number not in self._values:
            made = self.graph.nodes[self.graph.maker[number]].name
            raise StageError(f"a value of {made} is taken once more before it is there")
        value = self._values[number]
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._values[number]
        return value

    def _communication(self, node: int) -> Communication:
        moving = self.graph.nodes[node]
        assert isinstance(moving, Communication)
        return moving


def _is_note(value: Any) -> bool:
    return isinstance(value, (SavedTensor, RegionOutput, RegionInner))


def _restored(value: Any) -> Any:
    return value_of(value) if _is_note(value) else value
