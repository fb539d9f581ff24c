"""Recomputes nodes of a microbatch before their backward: segments run and exchanges send a second time.

    forward      permute -> [dispatch] -> experts      the rows that arrive are not held
    recompute    permute -> [dispatch] -> experts      with the decisions and the route of the forward

All ranks of an expert group recompute alike: the steps are part of the cell program. Steps are left out by a decision
from facts that all ranks know.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedc.cell.recomputed import SENDING
from schedc_runtime.errors import StageError
from schedc_runtime.recompute.levels import MicrobatchRecorder
from schedc_runtime.recompute.notes import Producer
from schedc_runtime.recompute.regions import NOTES, repeat_region, value_of
from schedc_runtime.segments.graph import Communication, Segment, StageGraph


class SegmentRecompute:
    """The recomputation of one microbatch."""

    def __init__(self, graph: StageGraph, recorder: MicrobatchRecorder) -> None:
        self.graph, self.recorder = graph, recorder
        self.pending: dict[int, Any] = {}
        self.held: dict[int, Any] = {}
        """Notes of the values that enter recomputed segments, by number."""
        self._values: dict[int, Any] = {}
        """Recomputed values that a node has yet to take, by number."""
        self._uses: dict[int, int] = {}
        self._producers: dict[int, weakref.ref[Producer]] = {}

    def skips(self, node: int) -> bool:
        """Whether this microbatch holds what the node would recompute."""
        return not self.recorder.runs(self.graph.shape.nodes[node])

    def forwarded(self, node: int, values: Iterable[tuple[int, Any]]) -> None:
        """Hold the inputs of a segment that will be repeated as a whole."""
        if node not in self.recorder.plan.replayed or self.skips(node):
            return
        for number, value in values:
            if self.graph.maker.get(number) not in self._senders:
                self.held[number] = pytree.tree_map_only(Tensor, self.recorder.note, value)

    def sent(self, node: int, payload: Iterable[Any]) -> None:
        """Hold what an exchange sends, if it sends it a second time and no recomputed segment makes it."""
        if node not in self.graph.recomputed or self._of_experts(node) or self.skips(node):
            return
        for number, value in zip(self._communication(node).takes, payload, strict=True):
            if number >= 0:
                self.held[number] = pytree.tree_map_only(Tensor, self.recorder.note, value)

    def arrived(self, node: int, received: Sequence[Tensor]) -> None:
        """Do not hold what an exchange brought, if it will be sent a second time."""
        communication = self._communication(node)
        if node not in self.graph.recomputed or self.skips(node):
            return
        makers = [self.graph.maker.get(value) for value in communication.takes[1:]]
        if self._of_experts(node) and not self._senders.issuperset(makers):
            return  # Others hold these rows too; the exchange may not even have copied them.
        producer = Producer(communication.name)
        self._producers[node] = weakref.ref(producer)
        for element, tensor in enumerate(received):
            self.recorder.comes_from(producer, element, tensor)

    def run(self, module: nn.Module, node: int, random: AbstractContextManager[None]) -> None:
        """Run a segment a second time: for its backward, or for what is to be sent."""
        if self.skips(node):
            return
        if node not in self.recorder.plan.replayed:
            self.recorder.fill(node)
            return
        segment = self.graph.nodes[node]
        assert isinstance(segment, Segment)
        taken = [self._take(value) for value in segment.takes]
        with torch.no_grad(), random:
            results = repeat_region(self.recorder.kept[node], segment.run, module, *taken)
        self._keep(zip(segment.gives, results, strict=True))

    def start(self, node: int) -> None:
        if self.skips(node):
            return
        communication = self._communication(node)
        taken: list[Any] = [None if value < 0 else self._take(value) for value in communication.takes]
        route, payload = taken[0], taken[1:]
        with torch.no_grad():
            self.pending[node] = communication.exchange.start(route, *payload)

    def wait(self, node: int) -> None:
        if self.skips(node):
            return
        communication = self._communication(node)
        if node not in self.pending:
            raise StageError(f"{communication.name} was not started a second time")
        received = communication.exchange.finish(self.pending.pop(node))
        if (weak := self._producers.get(node)) is not None and (producer := weak()) is not None:
            producer.results = tuple(received)
        self._keep(
            (value, received[element])
            for value, element in zip(communication.gives, communication.elements, strict=True)
        )

    @property
    def restored(self) -> list[Any]:
        """The recomputed values that are held: brought by exchanges, or yet to be sent."""
        producers = [producer for weak in self._producers.values() if (producer := weak()) is not None]
        return [*self._values.values(), *(x.results for x in producers)]

    def _keep(self, values: Iterable[tuple[int, Any]]) -> None:
        for number, value in values:
            users = [node for node in self.graph.consumers[number] if node in self._senders]
            if users:
                self._values[number], self._uses[number] = value, len(users)

    @property
    def _senders(self) -> frozenset[int]:
        """The recomputed nodes that take values. Segments whose regions repeat by themselves are not among them."""
        return frozenset(
            node for node in self.graph.recomputed
            if node in self.recorder.plan.replayed or isinstance(self.graph.nodes[node], Communication)
        )  # fmt: skip

    def _of_experts(self, node: int) -> bool:
        """Whether an exchange sends rows to experts, which recomputed segments make."""
        return self.graph.shape.nodes[node].role in SENDING

    def _take(self, number: int) -> Any:
        if number in self.held:
            return pytree.tree_map(_restored, self.held[number], is_leaf=_is_note)
        if number not in self._values:
            maker = self.graph.nodes[self.graph.maker[number]].name
            raise StageError(f"a recomputed value of {maker} is taken before it is there")
        value = self._values[number]
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._values[number]
        return value

    def _communication(self, node: int) -> Communication:
        communication = self.graph.nodes[node]
        assert isinstance(communication, Communication)
        return communication


def _is_note(value: Any) -> bool:
    return isinstance(value, NOTES)


def _restored(value: Any) -> Any:
    return value_of(value) if _is_note(value) else value
