"""A stage that runs segment by segment: the micro-steps of each microbatch, in whatever legal order the caller takes.

    forward                          backward                              weight gradients
    begin(m, inputs)                 begin_backward(m, gradients)
    run(m, node)     a segment       run_backward(m, node)                 run_weight(m, node)
    start(m, node)   an exchange     start_backward(m, node)
    wait(m, node)                    wait_backward(m, node)
    outputs(m)                       input_gradients(m), end_backward(m)

Every segment is cut off from the others: its inputs are leaves of its own, and it has a backward of its own. A value
that several segments use gets the sum of their gradients in ascending order of the segments, whatever order they ran
in. Weight gradients of a parameter that several segments use are added in one order too, and every segment draws random
numbers of its own. So any order of the steps in which nothing is used before it is there gives the same bits.

Where something is recomputed, `run_again`, `start_again` and `wait_again` do nodes once more before their backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge

from schedc.cell.graph import StageShape
from schedc.plan.values import Recompute
from schedc_runtime.boundary import Boundary
from schedc_runtime.errors import StageError
from schedc_runtime.memory.recompute import Recomputation, draws, install
from schedc_runtime.segments.again import Again
from schedc_runtime.segments.flight import (
    Flight,
    Moved,
    Ran,
    Tensors,
    cut_off,
    edge_of,
    not_held,
    own_leaves,
    tensors_in,
)
from schedc_runtime.segments.graph import Communication, Segment, Slot, StageGraph, stage_graph
from schedc_runtime.stage import LossFunction, Stage, _backward, _check_loss
from schedc_runtime.weightgrad import WeightWork


class SegmentedStage(Stage):
    """A `Stage` that can also be run in micro-steps; its `forward`, `backward` and `weight` are those in serial order.

    inputs: number of values that enter the stage module. blocks: paths of the model's blocks in it; those without an
    exchange are one segment each.
    """

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
        self._flights: dict[int, Flight] = {}
        self._asked: dict[int, set[int]] = {}
        """By microbatch: nodes whose weight gradients were asked for and wait for others with the same parameter."""

    @property
    def shape(self) -> StageShape:
        return self.graph.shape

    @property
    def in_flight(self) -> tuple[int, ...]:
        return tuple(sorted(self._flights))

    @property
    def pending(self) -> tuple[int, ...]:
        return tuple(sorted({key // len(self.graph.nodes) for key in self._sink.pending}))

    def recompute(self, plan: Recompute, *, count: bool = False) -> None:
        self.check_empty()
        self._memory = Recomputation(plan, self.shape, self._draws, count=count)
        self.graph = replace(self.graph, again=self._memory.again)
        install(self.module)

    def reset(self) -> None:
        super().reset()
        self._flights.clear()
        self._asked.clear()

    # The forward.

    def begin(self, microbatch: int, inputs: Sequence[Tensor], target: Any = None, loss_scale: float = 1.0) -> None:
        """Take the tensors of the input boundary; see `Stage.forward`."""
        if microbatch in self._flights:
            raise StageError(f"stage {self.index}: microbatch {microbatch} is forwarded again before its backward")
        leaves = self._detach(inputs) if torch.is_grad_enabled() else tuple(inputs)
        values = dict(enumerate(self._input.unpack(leaves)))
        uses = [len(nodes) for nodes in self.graph.consumers]
        device = leaves[0].device if leaves else torch.device("cpu")
        self._flights[microbatch] = flight = Flight(self.graph, self.index, values, uses, target, loss_scale, device)
        if self.module.training and self._draws:
            flight.seed = int(torch.randint(2**62, (), dtype=torch.int64))
        if self._memory.active and torch.is_grad_enabled():
            flight.recorder = self._memory.recorder()
            flight.again = Again(self.graph, flight.recorder)

    def run(self, microbatch: int, node: int) -> None:
        """The forward of a segment."""
        flight, segment = self._flight(microbatch), self._segment(node)
        values = [(value, flight.value(value, node)) for value in segment.takes]
        enter = own_leaves if flight.recorder is None else not_held
        taken: list[tuple[Any, Any]] = [enter(value) for _, value in values]
        with self._random(flight, node), self._recording(flight, node):
            made = self._called(segment, [value for value, _ in taken])
        if flight.again is not None:
            flight.again.forwarded(node, values)
        if torch.is_grad_enabled():
            edges = tuple([tuple(map(edge_of, tensors_in(value))) for value in made])
            flight.done[node] = Ran(tuple([leaves for _, leaves in taken]), edges)
        flight.values |= {value: cut_off(result) for value, result in zip(segment.gives, made, strict=True)}
        flight.took(segment.takes)

    def _recording(self, flight: Flight, node: int) -> AbstractContextManager[None]:
        if flight.recorder is None:
            return nullcontext()
        flight.recorder.role, flight.recorder.layer = self.shape.nodes[node].role, self.shape.nodes[node].layer
        return flight.recorder.forwarding(node, node in self._memory.replayed)

    @contextmanager
    def _random(self, flight: Flight, node: int) -> Iterator[None]:
        """Random numbers of a segment's own, which do not depend on what ran before it."""
        if not (self.module.training and self._draws):
            yield
            return
        devices = [flight.device] if flight.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(flight.seed + node)
            yield

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
        if not torch.is_grad_enabled():
            del self._flights[microbatch]
        return tuple([tensor.detach() for tensor in self._output.pack(result)])

    def _form_loss(self, microbatch: int, flight: Flight, loss: Tensor) -> None:
        _check_loss(loss)
        self.losses[microbatch] = loss.detach()
        if torch.is_grad_enabled():
            self._one = torch.ones_like(loss)
            flight.loss = edge_of(loss * flight.loss_scale)

    # The backward.

    def begin_backward(self, microbatch: int, gradients: Sequence[Tensor | None] = ()) -> None:
        """Take the gradients of the differentiable outputs; none on a stage that forms the loss."""
        flight = self._flight(microbatch)
        if flight.recorder is not None:
            flight.recorder.forwarded()
        if self.loss_fn is not None:
            if flight.loss is not None:
                _backward((flight.loss,), (self._one,))
        else:
            places = self._output.differentiable
            if len(gradients) != len(places):
                raise StageError(f"stage {self.index}: {len(gradients)} output gradients for {len(places)} outputs")
            for place, gradient in zip(places, gradients, strict=True):
                leaf = flight.sent[place]
                if gradient is not None and leaf.requires_grad:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        for value, leaves in flight.leaving:
            flight.give(value, len(self.graph.nodes), leaves)
        flight.leaving, flight.sent, flight.loss = [], (), None

    def run_backward(self, microbatch: int, node: int) -> None:
        """The input gradients of a segment; its weight gradients are left to `run_weight`."""
        flight, segment = self._flight(microbatch), self._segment(node)
        ran = flight.pop(node, Ran)
        pairs = [
            (edge, gradient)
            for value, edges in zip(segment.gives, ran.edges, strict=True)
            for edge, gradient in zip(edges, flight.summed(value, len(edges)), strict=True)
            if edge is not None and gradient is not None
        ]
        if pairs:
            self._differentiate_segment(microbatch, node, pairs)
        for value, leaves in zip(segment.takes, ran.leaves, strict=True):
            flight.give(value, node, leaves)

    def _differentiate_segment(self, microbatch: int, node: int, pairs: Sequence[tuple[GradientEdge, Tensor]]) -> None:
        """Gradients that autograd itself adds to a parameter of several segments become weight work as well."""
        shared = self._shared.get(node, ())
        before = [parameter.grad for parameter in shared]
        for parameter in shared:
            parameter.grad = None
        self._sink.defer(self._key(microbatch, node))
        try:
            _backward(tuple([edge for edge, _ in pairs]), tuple([gradient for _, gradient in pairs]))
        finally:
            self._sink.at_once()
            for parameter, grad in zip(shared, before, strict=True):
                made, parameter.grad = parameter.grad, grad
                if made is not None:
                    self._sink.pending[self._key(microbatch, node)].append(WeightWork(parameter, _as_made, made, made))
        if not self._sink.pending[self._key(microbatch, node)]:
            del self._sink.pending[self._key(microbatch, node)]

    def start_backward(self, microbatch: int, node: int) -> None:
        """Start sending the gradients of an exchange back; nothing where none are wanted, which all ranks know."""
        flight, moving = self._flight(microbatch), self._communication(node)
        moved = flight.done.get(node)
        if not isinstance(moved, Moved):
            raise StageError(f"stage {self.index}: {moving.name} of microbatch {microbatch} has not been forwarded")
        if not any(moved.wanted):
            return
        found = {
            element: flight.summed(value, 1)[0] for value, element in zip(moving.gives, moving.elements, strict=True)
        }
        gradients = [
            torch.zeros(shape, dtype=dtype, device=device) if (grad := found.get(element)) is None else grad
            for element, (shape, dtype, device) in enumerate(moved.given)
        ]
        with torch.no_grad():
            flight.pending[node] = moving.exchange.start_backward(moved.route, *gradients)

    def wait_backward(self, microbatch: int, node: int) -> None:
        """Wait for the gradients of an exchange."""
        flight, moving = self._flight(microbatch), self._communication(node)
        moved = flight.pop(node, Moved)
        if not any(moved.wanted):
            return
        back = moving.exchange.finish_backward(flight.started(node, "backward"))
        for value, gradient, wanted in zip(moving.takes[1:], back, moved.wanted, strict=True):
            if wanted:
                flight.add(value, node, (gradient,))

    def end_backward(self, microbatch: int) -> None:
        """Let go of a microbatch whose backward steps have all run."""
        flight = self._flight(microbatch)
        if under_way := {*flight.pending, *(flight.again.pending if flight.again else ())}:
            names = [self.graph.nodes[node].name for node in sorted(under_way)]
            raise StageError(f"stage {self.index}: microbatch {microbatch} ends while {names} are under way")
        del self._flights[microbatch]

    def input_gradients(self, microbatch: int) -> Tensors:
        """The gradient of each differentiable input."""
        flight = self._flight(microbatch)
        found: list[Tensor | None] = []
        for value, tensors in enumerate(self._entry_widths):
            found += flight.summed(value, tensors)
        specs = self._input.tensors
        return tuple(
            torch.zeros(specs[at].shape, dtype=specs[at].dtype, device=flight.device) if (g := found[at]) is None else g
            for at in self._input.differentiable
        )

    def run_weight(self, microbatch: int, node: int) -> None:
        """Add the weight gradients of a segment to the parameters'.

        Of segments that share a parameter the last one adds first: the others wait for those behind them.
        """
        group = self.graph.sharing.get(node, (node,))
        asked = self._asked.setdefault(microbatch, set())
        asked.add(node)
        for member in reversed(group):
            if member not in asked:
                return
            if (key := self._key(microbatch, member)) in self._sink.pending:
                self._sink.flush(key)
        asked.difference_update(group)
        if not asked:
            del self._asked[microbatch]

    # Nodes once more, for the backward; nothing where it was decided to hold what they make.

    def run_again(self, microbatch: int, node: int) -> None:
        """The forward of a segment once more: what its backward needs, or what is to be sent."""
        flight = self._flight(microbatch)
        self._again(flight, node).run(self.module, node, self._random(flight, node))

    def start_again(self, microbatch: int, node: int) -> None:
        """Send what an exchange brought once more."""
        self._again(self._flight(microbatch), node).start(node)

    def ready_again(self, microbatch: int, node: int) -> bool:
        return self._again(self._flight(microbatch), node).ready(node)

    def wait_again(self, microbatch: int, node: int) -> None:
        """Wait for what is sent once more."""
        self._again(self._flight(microbatch), node).wait(node)

    def _again(self, flight: Flight, node: int) -> Again:
        if flight.again is None or node not in self.graph.again:
            raise StageError(f"stage {self.index}: {self.graph.nodes[node].name} is not recomputed")
        return flight.again

    # The same in serial order.

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], target: Any = None, loss_scale: float = 1.0
    ) -> Tensors:
        self.begin(microbatch, inputs, target, loss_scale)
        for node, what in enumerate(self.graph.nodes):
            if isinstance(what, Segment):
                self.run(microbatch, node)
            else:
                self.start(microbatch, node)
                self.wait(microbatch, node)
        return self.outputs(microbatch)

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None] = (), *, defer: bool = False) -> Tensors:
        self.begin_backward(microbatch, output_grads)
        for node in self.shape.again:
            if isinstance(self.graph.nodes[node], Segment):
                self.run_again(microbatch, node)
            else:
                self.start_again(microbatch, node)
                self.wait_again(microbatch, node)
        for node in reversed(range(len(self.graph.nodes))):
            if isinstance(self.graph.nodes[node], Segment):
                self.run_backward(microbatch, node)
            else:
                self.start_backward(microbatch, node)
                self.wait_backward(microbatch, node)
        gradients = self.input_gradients(microbatch)
        self.end_backward(microbatch)
        if not defer:
            self.weight(microbatch)
        return gradients

    def weight(self, microbatch: int) -> None:
        for node in reversed(self.shape.weights):
            self.run_weight(microbatch, node)

    # Values and gradients.

    @cached_property
    def _draws(self) -> bool:
        return draws(self.module)

    @cached_property
    def _shared(self) -> dict[int, tuple[nn.Parameter, ...]]:
        """By node: its parameters that other nodes have too."""
        return {node: self.graph.shared_parameters(node) for node in self.graph.sharing}

    @property
    def _entry_widths(self) -> list[int]:
        """How many tensors are inside each value that enters."""
        tree: Any = self._input.tree
        widths = [0] * tree.num_children
        place = 0
        for value, child in enumerate(tree.children()):
            entries = self._input.entries[place : place + child.num_leaves]
            widths[value] = sum(entry in self._input.tensors for entry in entries)
            place += child.num_leaves
        return widths

    def bind(self, input: Boundary, output: Boundary) -> None:
        super().bind(input, output)
        if input.tree.num_children != self.graph.inputs:
            raise StageError(
                f"stage {self.index} was traced for {self.graph.inputs} inputs, but {input.tree.num_children} enter it"
            )

    def _key(self, microbatch: int, node: int) -> int:
        """Under which the weight sink keeps the work of a node."""
        return microbatch * len(self.graph.nodes) + node

    def _flight(self, microbatch: int) -> Flight:
        flight = self._flights.get(microbatch)
        if flight is None:
            raise StageError(f"stage {self.index}: microbatch {microbatch} has not been forwarded")
        return flight

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


def _as_made(inputs: Tensor, grad: Tensor, parameter: nn.Parameter, options: Any) -> Tensor:
    """The compute of weight work whose gradient is there already."""
    return grad


_WRITTEN = ("leaf Variable that requires grad", "is a view and is being modified inplace")
"""How torch says that a segment writes into what it was given."""
