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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from schedc.cell.graph import StageShape
from schedc_runtime.boundary import Boundary
from schedc_runtime.errors import StageError
from schedc_runtime.segments.graph import Communication, Segment, Slot, StageGraph, stage_graph
from schedc_runtime.stage import LossFunction, Stage, _backward, _check_loss
from schedc_runtime.weightgrad import WeightWork

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
"""Of the tensors inside one value, in order; None is zero."""


class _Ran(NamedTuple):
    """What the backward of a segment needs: its own leaves, per value it took, and where gradients enter its graph."""

    leaves: tuple[Tensors, ...]
    edges: tuple[tuple[GradientEdge | None, ...], ...]


class _Moved(NamedTuple):
    """What the backward of an exchange needs: its route, which of its payload want gradients, what it gave."""

    route: Any
    wanted: tuple[bool, ...]
    given: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


@dataclass
class _Flight:
    """A microbatch between its forward and the end of its backward."""

    values: dict[int, Any]
    uses: list[int]
    """[values] how many nodes have yet to take each value; it is let go of with the last."""
    target: Any
    loss_scale: float
    device: torch.device
    done: dict[int, _Ran | _Moved] = field(default_factory=dict)
    pending: dict[int, Any] = field(default_factory=dict)
    """Exchanges under way by node, of the forward or of the backward."""
    gradients: dict[int, dict[int, Gradients]] = field(default_factory=dict)
    """By value, then by the node that took it."""
    leaving: list[tuple[int, Tensors]] = field(default_factory=list)
    """The values of the output with the leaves that stand for them there."""
    sent: Tensors = ()
    loss: GradientEdge | None = None
    seed: int = 0
    """Of the random numbers of its segments, where they draw any."""


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
        deferring: bool = True,
    ) -> None:
        # Weight gradients are steps of their own in every cell, so that they are always put aside.
        super().__init__(module, index, stages, loss_fn=loss_fn, deferring=True)
        self.graph: StageGraph = stage_graph(module, inputs, blocks)
        self._flights: dict[int, _Flight] = {}
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
        self._flights[microbatch] = flight = _Flight(values, uses, target, loss_scale, device)
        if self.module.training and self._draws:
            flight.seed = int(torch.randint(2**62, (), dtype=torch.int64))

    def run(self, microbatch: int, node: int) -> None:
        """The forward of a segment."""
        flight, segment = self._flight(microbatch), self._segment(node)
        taken = [_leaf(self._value(flight, value, node)) for value in segment.takes]
        with self._random(flight, node):
            made = self._called(segment, [value for value, _ in taken])
        if torch.is_grad_enabled():
            edges = tuple([tuple(map(_edge, _tensors(value))) for value in made])
            flight.done[node] = _Ran(tuple([leaves for _, leaves in taken]), edges)
        flight.values |= {value: _detached(result) for value, result in zip(segment.gives, made, strict=True)}
        self._took(flight, segment.takes)

    @contextmanager
    def _random(self, flight: _Flight, node: int) -> Iterator[None]:
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
        taken: list[Any] = [None if value < 0 else self._value(flight, value, node) for value in moving.takes]
        route, payload = taken[0], taken[1:]
        with torch.no_grad():
            flight.pending[node] = moving.exchange.start(route, *[tensor.detach() for tensor in payload])
        wanted = tuple([moving.exchange.differentiable and tensor.requires_grad for tensor in payload])
        flight.done[node] = _Moved(route, wanted, ())
        self._took(flight, moving.takes)

    def ready(self, microbatch: int, node: int) -> bool:
        """Whether the exchange that is under way at ``node`` need not wait for another rank of this process."""
        flight = self._flight(microbatch)
        return node not in flight.pending or self._communication(node).exchange.ready(flight.pending[node])

    def wait(self, microbatch: int, node: int) -> None:
        """Wait for an exchange that was started."""
        flight, moving = self._flight(microbatch), self._communication(node)
        given = moving.exchange.finish(self._started(flight, node, "forward"))
        moved = flight.done[node]
        assert isinstance(moved, _Moved)
        flight.done[node] = moved._replace(given=tuple((t.shape, t.dtype, t.device) for t in given))
        for value, element in zip(moving.gives, moving.elements, strict=True):
            wanted = element < len(moved.wanted) and moved.wanted[element]
            flight.values[value] = given[element].detach().requires_grad_(wanted)

    def outputs(self, microbatch: int) -> Tensors:
        """The tensors of the output boundary, detached; on the last stage the loss is computed from them."""
        flight = self._flight(microbatch)
        here = {value: _leaf(self._value(flight, value, len(self.graph.nodes))) for value in set(self.graph.leaving)}
        result = fx.node.map_aggregate(self.graph.output, lambda x: here[x.value][0] if isinstance(x, Slot) else x)
        if torch.is_grad_enabled():
            flight.leaving = [(value, leaves) for value, (_, leaves) in here.items()]
            flight.sent = self._output.pack(result)
        if self.loss_fn is not None and (torch.is_grad_enabled() or flight.target is not None):
            self._form_loss(microbatch, flight, self.loss_fn(result, flight.target))
        self._took(flight, tuple(here))
        if not torch.is_grad_enabled():
            del self._flights[microbatch]
        return tuple([tensor.detach() for tensor in self._output.pack(result)])

    def _form_loss(self, microbatch: int, flight: _Flight, loss: Tensor) -> None:
        _check_loss(loss)
        self.losses[microbatch] = loss.detach()
        if torch.is_grad_enabled():
            self._one = torch.ones_like(loss)
            flight.loss = _edge(loss * flight.loss_scale)

    # The backward.

    def begin_backward(self, microbatch: int, gradients: Sequence[Tensor | None] = ()) -> None:
        """Take the gradients of the differentiable outputs; none on a stage that forms the loss."""
        flight = self._flight(microbatch)
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
            self._give(flight, value, len(self.graph.nodes), leaves)
        flight.leaving, flight.sent, flight.loss = [], (), None

    def run_backward(self, microbatch: int, node: int) -> None:
        """The input gradients of a segment; its weight gradients are left to `run_weight`."""
        flight, segment = self._flight(microbatch), self._segment(node)
        ran = self._pop(flight, node, _Ran)
        pairs = [
            (edge, gradient)
            for value, edges in zip(segment.gives, ran.edges, strict=True)
            for edge, gradient in zip(edges, self._summed(flight, value, len(edges)), strict=True)
            if edge is not None and gradient is not None
        ]
        if pairs:
            self._differentiate_segment(microbatch, node, pairs)
        for value, leaves in zip(segment.takes, ran.leaves, strict=True):
            self._give(flight, value, node, leaves)

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
        if not isinstance(moved, _Moved):
            raise StageError(f"stage {self.index}: {moving.name} of microbatch {microbatch} has not been forwarded")
        if not any(moved.wanted):
            return
        found = {
            element: self._summed(flight, value, 1)[0]
            for value, element in zip(moving.gives, moving.elements, strict=True)
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
        moved = self._pop(flight, node, _Moved)
        if not any(moved.wanted):
            return
        back = moving.exchange.finish_backward(self._started(flight, node, "backward"))
        for value, gradient, wanted in zip(moving.takes[1:], back, moved.wanted, strict=True):
            if wanted:
                self._add(flight, value, node, (gradient,))

    def end_backward(self, microbatch: int) -> None:
        """Let go of a microbatch whose backward steps have all run."""
        flight = self._flight(microbatch)
        if flight.pending:
            names = [self.graph.nodes[node].name for node in flight.pending]
            raise StageError(f"stage {self.index}: microbatch {microbatch} ends while {names} are under way")
        del self._flights[microbatch]

    def input_gradients(self, microbatch: int) -> Tensors:
        """The gradient of each differentiable input."""
        flight = self._flight(microbatch)
        found: list[Tensor | None] = []
        for value, tensors in enumerate(self._entry_widths):
            found += self._summed(flight, value, tensors)
        specs = self._input.tensors
        return tuple(
            torch.zeros(specs[at].shape, dtype=specs[at].dtype, device=flight.device) if (g := found[at]) is None else g
            for at in self._input.differentiable
        )

    def run_weight(self, microbatch: int, node: int) -> None:
        """Add the weight gradients of a segment to the parameters'.

        Segments that share a parameter add theirs together, the last one first, once all were asked.
        """
        group = self.graph.sharing.get(node, (node,))
        asked = self._asked.setdefault(microbatch, set())
        asked.add(node)
        if not asked.issuperset(group):
            return
        asked.difference_update(group)
        if not asked:
            del self._asked[microbatch]
        for member in reversed(group):
            if (key := self._key(microbatch, member)) in self._sink.pending:
                self._sink.flush(key)

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
        """Whether a layer has a dropout: a module of that kind, or a probability that it passes on."""
        return any(
            "dropout" in f"{type(layer).__name__}.{name}".lower() and isinstance(value, float) and value > 0
            for layer in self.module.modules()
            for name, value in vars(layer).items()
        )

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

    def _flight(self, microbatch: int) -> _Flight:
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
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise StageError(
                f"stage {self.index}: {segment.name} writes into a value of another segment ({error})",
                "begin it with an operation that makes a new tensor: x = x + y rather than x += y, and no inplace=True",
            ) from error

    def _value(self, flight: _Flight, value: int, node: int) -> Any:
        if value not in flight.values:
            maker = self.graph.nodes[self.graph.maker[value]].name if value in self.graph.maker else "an input"
            taker = self.graph.nodes[node].name if node < len(self.graph.nodes) else "the output"
            raise StageError(f"stage {self.index}: {taker} takes a value of {maker} before it is there")
        return flight.values[value]

    def _took(self, flight: _Flight, values: Iterable[int]) -> None:
        for value in dict.fromkeys(values):
            if value >= 0:
                flight.uses[value] -= 1
                if not flight.uses[value]:
                    del flight.values[value]

    def _started(self, flight: _Flight, node: int, half: str) -> Any:
        if node not in flight.pending:
            raise StageError(f"stage {self.index}: the {half} of {self.graph.nodes[node].name} was not started")
        return flight.pending.pop(node)

    def _pop(self, flight: _Flight, node: int, kind: type) -> Any:  # type: ignore[override]
        done = flight.done.pop(node, None)
        if not isinstance(done, kind):
            raise StageError(f"stage {self.index}: {self.graph.nodes[node].name} has no forward to differentiate")
        return done

    def _give(self, flight: _Flight, value: int, node: int, leaves: Tensors) -> None:
        """The gradients of a node's own leaves for ``value`` become its part of the value's."""
        if any(leaf.grad is not None for leaf in leaves):
            self._add(flight, value, node, tuple(leaf.grad for leaf in leaves))

    def _add(self, flight: _Flight, value: int, node: int, gradients: Gradients) -> None:
        parts = flight.gradients.setdefault(value, {})
        if node in parts:  # a value that an exchange carries twice
            gradients = tuple(map(_plus, parts[node], gradients))
        parts[node] = gradients

    def _summed(self, flight: _Flight, value: int, tensors: int) -> Gradients:
        """The gradients of a value: the sum over the nodes that took it, in ascending order."""
        parts = flight.gradients.pop(value, {})
        total: Gradients = (None,) * tensors
        for node in sorted(parts):
            total = tuple(map(_plus, total, parts[node]))
        return total


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _tensors(value: Any) -> Tensors:
    """The tensors inside a value; of an object such as a route none, which carries no gradient."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list, dict)):
        return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return ()


def _leaf(value: Any) -> tuple[Any, Tensors]:
    """``value`` with leaves of its own in the places of its tensors, and these."""
    if isinstance(value, Tensor):
        leaf = value.detach().requires_grad_(value.requires_grad and torch.is_grad_enabled())
        return leaf, (leaf,)
    copied = _detached(value)
    return copied, _tensors(copied)


def _detached(value: Any) -> Any:
    """``value`` cut off from what made it; its tensors still say whether they want a gradient."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list, dict)):
        return pytree.tree_map_only(Tensor, _detached, value)
    return value


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _as_made(inputs: Tensor, grad: Tensor, parameter: nn.Parameter, options: Any) -> Tensor:
    """The compute of weight work whose gradient is there already."""
    return grad
