"""The forward of a segmented stage in micro-steps: segments, exchanges, and what leaves the stage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from schedc_runtime.errors import StageError
from schedc_runtime.recompute.whole_stage import letting_go
from schedc_runtime.segments.base import FlyingStage
from schedc_runtime.segments.graph import Segment, Slot
from schedc_runtime.segments.in_flight import (
    Flight,
    Moved,
    Ran,
    Tensors,
    cut_off,
    edge_of,
    not_held,
    own_leaves,
    own_views,
    tensors_in,
)
from schedc_runtime.segments.recompute import Again
from schedc_runtime.stage.stage import Kept, check_loss, device_holding


class ForwardSteps(FlyingStage):
    """The micro-steps of a forward."""

    def begin(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        target: Any = None,
        loss_scale: float = 1.0,
        *,
        again: bool = False,
    ) -> None:
        """Take the tensors of the input boundary; see `Stage.forward`."""
        if microbatch in self.in_flight:
            raise StageError(f"stage {self.index}: microbatch {microbatch} is forwarded again before its backward")
        graph, memory = (self.remaking, self._ahead) if again else (self.graph, self._memory)
        leaves = self._detach(inputs) if torch.is_grad_enabled() else tuple(inputs)
        values = dict(enumerate(self._input.unpack(leaves)))
        uses = [len(nodes) for nodes in graph.consumers]
        flight = Flight(graph, self.index, values, uses, target, loss_scale, device_holding(leaves))
        self._flights[microbatch] = flight
        if again and self.runs_whole and torch.is_grad_enabled():
            # Before the seed is drawn, which the second time is drawn again.
            beginning = self._beginnings.begin(flight.device)
            flight.kept = Kept(tuple(inputs), target, loss_scale, beginning)
        elif memory.active and torch.is_grad_enabled():
            flight.recorder = memory.recorder()
            flight.again = Again(graph, flight.recorder)
        if self.module.training and self._draws:
            flight.seed = int(torch.randint(2**62, (), dtype=torch.int64))

    def run(self, microbatch: int, node: int) -> None:
        """The forward of a segment."""
        flight, segment = self._flight(microbatch), self._segment(node)
        values = [(value, flight.value(value, node)) for value in segment.takes]
        enter = not_held if flight.recorder else own_views if _autocast(flight) else own_leaves
        taken: list[tuple[Any, Any]] = [enter(value) for _, value in values]
        with self._random(flight, node), self._recording(flight, node):
            made = self._called(segment, [value for value, _ in taken])
        if flight.again is not None:
            flight.again.forwarded(node, values)
        if torch.is_grad_enabled() and flight.kept is None:
            edges = tuple([tuple(map(edge_of, tensors_in(value))) for value in made])
            flight.done[node] = Ran(tuple([leaves for _, leaves in taken]), edges)
        flight.values |= {value: cut_off(result) for value, result in zip(segment.gives, made, strict=True)}
        flight.took(segment.takes)

    def _recording(self, flight: Flight, node: int) -> AbstractContextManager[None]:
        if flight.kept is not None:
            return letting_go()
        if flight.recorder is None:
            return nullcontext()
        flight.recorder.layer = self.shape.nodes[node].layer
        return flight.recorder.forwarding(node, node in flight.recorder.plan.replayed)

    def start(self, microbatch: int, node: int) -> None:
        """Start an exchange; returns at once."""
        flight, moving = self._flight(microbatch), self._communication(node)
        taken: list[Any] = [None if value < 0 else flight.value(value, node) for value in moving.takes]
        route, payload = taken[0], taken[1:]
        with torch.no_grad():
            flight.pending[node] = moving.exchange.start(route, *[tensor.detach() for tensor in payload])
        wanted = tuple([moving.exchange.differentiable and tensor.requires_grad for tensor in payload])
        flight.done[node] = Moved(route, wanted, ())
        flight.took(moving.takes)

    def ready(self, microbatch: int, node: int) -> bool:
        """Whether the exchange that is under way at ``node`` need not wait for another rank of this process."""
        flight = self._flight(microbatch)
        return node not in flight.pending or self._communication(node).exchange.ready(flight.pending[node])

    def wait(self, microbatch: int, node: int) -> None:
        """Wait for an exchange that was started."""
        flight, moving = self._flight(microbatch), self._communication(node)
        given = moving.exchange.finish(flight.started(node, "forward"))
        moved = flight.done[node]
        assert isinstance(moved, Moved)
        flight.done[node] = moved._replace(given=tuple((t.shape, t.dtype, t.device) for t in given))
        for value, element in zip(moving.gives, moving.elements, strict=True):
            wanted = element < len(moved.wanted) and moved.wanted[element]
            flight.values[value] = given[element].detach().requires_grad_(wanted)
        if flight.again is not None:
            flight.again.arrived(node, given)

    def outputs(self, microbatch: int) -> Tensors:
        """The tensors of the output boundary, detached; on the last stage the loss is computed from them."""
        flight = self._flight(microbatch)
        here = {value: own_leaves(flight.value(value, len(self.graph.nodes))) for value in set(self.graph.leaving)}
        result = fx.node.map_aggregate(self.graph.output, lambda x: here[x.value][0] if isinstance(x, Slot) else x)
        if torch.is_grad_enabled():
            flight.leaving = [(value, leaves) for value, (_, leaves) in here.items()]
            flight.sent = self._output.pack(result)
        if self.loss_fn is not None and (torch.is_grad_enabled() or flight.target is not None):
            self._form_loss(microbatch, flight, self.loss_fn(result, flight.target))
        flight.took(tuple(here))
        if flight.kept is not None:
            self._beginnings.end(flight.kept.beginning)
            self.kept[microbatch] = flight.kept
        if flight.kept is not None or not torch.is_grad_enabled():
            del self._flights[microbatch]
        return tuple([tensor.detach() for tensor in self._output.pack(result)])

    def _form_loss(self, microbatch: int, flight: Flight, loss: Tensor) -> None:
        check_loss(loss)
        self.losses[microbatch] = loss.detach()
        if torch.is_grad_enabled():
            self._one = torch.ones_like(loss)
            flight.loss = edge_of(loss * flight.loss_scale)

    def _called(self, segment: Segment, taken: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return segment.run(self.module, *taken)
        except RuntimeError as error:
            if not any(text in str(error) for text in _WRITTEN):
                raise
            raise StageError(
                f"stage {self.index}: {segment.name} writes into a value of another segment ({error})",
                "begin it with an operation that makes a new tensor: x = x + y rather than x += y, and no inplace=True",
            ) from error


_WRITTEN = ("leaf Variable that requires grad", "is a view and is being modified inplace")
"""How torch says that a segment writes into what it was given."""


def _autocast(flight: Flight) -> bool:
    return torch.is_autocast_enabled(flight.device.type)
