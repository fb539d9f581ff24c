"""A stage as a graph of segments and exchanges over numbered values, and its shape as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from typing import Any

from torch import fx, nn

from schedc.cell.graph import Lane, Node, StageShape
from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.recorded_stage import RecordedStage
from schedc_runtime.ranks.exchange import Exchange, RoutingPart
from schedc_runtime.segments.cut import (
    ALL_ROWS,
    JOINS,
    CutNode,
    Cutting,
    ExchangeFacts,
    Group,
    cut,
    is_element,
    slice_of,
)
from schedc_runtime.segments.declared import USES
from schedc_runtime.segments.fx_trace import Traces, stage_nodes
from schedc_runtime.segments.segment_code import SegmentCode


@dataclass(frozen=True, eq=False)
class Segment:
    """Compute between cuts.

    run: takes the stage module and the values ``takes``; returns the values ``gives`` as a tuple.
    modules: paths of the called submodules. parameters: paths of the parameters that are read directly.
    differentiable: whether gradients go through it; not where all of its modules say ``differentiable = False``.
    slice: the slice of tokens that it runs, of how many. joins: whether it first joins slices.
    """

    name: str
    run: SegmentCode
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    differentiable: bool = True
    slice: tuple[int, int] = ALL_ROWS
    joins: bool = False


@dataclass(frozen=True, eq=False)
class Communication:
    """An exchange.

    takes: the value of its route (-1 for None), then the values of its payload. gives: the values that are used.
    elements: number of each value of ``gives`` in the tuple that the exchange returns. slice: as of a `Segment`.
    """

    name: str
    exchange: Exchange
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    elements: tuple[int, ...]
    slice: tuple[int, int] = ALL_ROWS


@dataclass(frozen=True, eq=False)
class Whole:
    """A stage that is not cut: its graph has one node, with the inputs and outputs of the stage."""

    name: str = "stage"
    takes: tuple[int, ...] = (0,)
    gives: tuple[int, ...] = (1,)
    differentiable: bool = True
    slice: tuple[int, int] = ALL_ROWS


@dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage as nodes over numbered values.

    nodes: in topological order. inputs: number of values that enter the stage; they are values 0 to inputs - 1.
    values: number of all values. output: what the stage returns, with a `Slot` in place of each value.
    recomputed: share of each node that runs a second time before its backward, by node.
    traced: the stage in the order of the model. part: the node that each call of ``traced`` belongs to.
    """

    module: nn.Module
    nodes: tuple[Segment | Communication | Whole, ...]
    inputs: int
    values: int
    output: Any
    recomputed: Mapping[int, float] = field(default_factory=dict)
    traced: fx.Graph = field(default_factory=fx.Graph)
    part: Mapping[fx.Node, int] = field(default_factory=dict)

    @cached_property
    def maker(self) -> dict[int, int]:
        """The node that makes each value, inputs excepted."""
        return {value: number for number, node in enumerate(self.nodes) for value in node.gives}

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """[values] the nodes that take each value, ascending; len(nodes) means the stage's output."""
        takers: list[list[int]] = [[] for _ in range(self.values)]
        for number, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.takes):
                if value >= 0:
                    takers[value].append(number)
        for value in dict.fromkeys(self.leaving):
            takers[value].append(len(self.nodes))
        return tuple(map(tuple, takers))

    @cached_property
    def leaving(self) -> tuple[int, ...]:
        """The values that the output is made of."""
        values: list[int] = []
        fx.node.map_aggregate(self.output, lambda leaf: values.append(leaf.value) if isinstance(leaf, Slot) else None)
        return tuple(values)

    @cached_property
    def shape(self) -> StageShape:
        """The graph as plain data, for the compiler."""
        nodes = [
            Node(
                node.name,
                Lane(node.exchange.lane) if isinstance(node, Communication) else Lane.COMPUTE,
                tuple(sorted({self.maker[value] for value in node.takes if value >= self.inputs})),
                inputs=any(0 <= value < self.inputs for value in node.takes),
                differentiable=(node.exchange if isinstance(node, Communication) else node).differentiable,
                weights=node.exchange.returns
                if isinstance(node, Communication)
                else isinstance(node, Segment) and (self.defers(number) or number in self.sharing),
                recomputed=number in self.recomputed,
                share=self.recomputed.get(number, 1.0),
                slice=node.slice[0],
                slices=node.slice[1],
                behind=number - 1 if node.slice[0] else -1,
            )
            for number, node in enumerate(self.nodes)
        ]
        return StageShape(tuple(nodes), tuple(sorted({self.maker[v] for v in self.leaving if v >= self.inputs})))

    def defers(self, node: int) -> bool:
        """Whether a node has weight gradients that can be deferred: gradients of matrices, from products."""
        return any(parameter.dim() > 1 for parameter in self.parameters(node))

    @cached_property
    def sharing(self) -> dict[int, tuple[int, ...]]:
        """By node that shares a parameter with another: all nodes connected by shared parameters.

        From the last to the first, they are in the order in which gradients are added. The slices of one node have an
        order already, and do not count as several.
        """
        users: dict[int, list[int]] = {}
        for node in range(len(self.nodes)):
            for parameter in self.parameters(node):
                users.setdefault(id(parameter), []).append(node)
        group = {node: {node} for node in range(len(self.nodes))}
        for nodes in users.values():
            together = set().union(*(group[node] for node in nodes))
            for node in together:
                group[node] = together
        order = {node: (node - each.slice[0], -each.slice[0]) for node, each in enumerate(self.nodes)}
        return {
            node: tuple(sorted(nodes, key=order.__getitem__))
            for node, nodes in group.items()
            if len({order[each][0] for each in nodes}) > 1
        }

    def parameters(self, node: int) -> tuple[nn.Parameter, ...]:
        """The trainable parameters of a node, each once."""
        segment = self.nodes[node]
        if not isinstance(segment, Segment):
            return ()
        parameters = [p for path in segment.modules for p in self.module.get_submodule(path).parameters()]
        for path in segment.parameters:
            owner, _, name = path.rpartition(".")
            value = getattr(self.module.get_submodule(owner), name, None)
            parameters += [value] if isinstance(value, nn.Parameter) else []
        return tuple({id(p): p for p in parameters if p.requires_grad}.values())

    def shared_parameters(self, node: int) -> tuple[nn.Parameter, ...]:
        """The parameters of a node that another node has too."""
        others = {id(p) for other in self.sharing.get(node, ()) if other != node for p in self.parameters(other)}
        return tuple(p for p in self.parameters(node) if id(p) in others)


@dataclass(frozen=True)
class Slot:
    """The place of a value in the output of a stage."""

    value: int


def stage_graph(
    module: nn.Module, inputs: int | None, blocks: Sequence[str] = (), traces: Traces | None = None
) -> StageGraph:
    """The segments of a stage module that takes ``inputs`` values; one node if None. blocks: paths of blocks in it.

    Blocks without an exchange are segments of their own. traces: what was traced for other graphs of the same stage.
    Raises `PartitionError` for what cannot be traced.
    """
    if inputs is None:
        return StageGraph(module, (Whole(),), 1, 2, Slot(1))
    graph = stage_nodes(module, inputs, {} if traces is None else traces)
    exchanges = {
        name: ExchangeFacts(_label(name, part), part.lane, _layer_of(module, name))
        for name, part in module.named_modules()
        if isinstance(part, Exchange)
    }
    dense = [path for path in blocks if not any(name.startswith(f"{path}.") or name == path for name in exchanges)]
    cutting = cut(graph, exchanges, dense)
    if isinstance(module, RecordedStage) and module.rewrite is not None:
        graph = module.rewrite(graph, module, cutting)
        cutting = cut(graph, exchanges, dense)
    return _GraphBuilder(module, graph, cutting, exchanges).build()


def _layer_of(module: nn.Module, path: str) -> str:
    """The path of the layer that has the exchange of a path."""
    owner = path.rpartition(".")[0]
    return owner.rpartition(".")[0] if isinstance(module.get_submodule(owner), RoutingPart) else owner


def _label(path: str, exchange: Exchange) -> str:
    """The label of an exchange, which names its node. Raises `PartitionError` unless it is a single word."""
    label = getattr(exchange, "label", None)
    if not isinstance(label, str) or not label.isidentifier():
        fault = "has no label" if label is None else f"has the label {label!r}"
        raise PartitionError(
            f"the exchange `{path}` of class {type(exchange).__name__} {fault}",
            'name the payload, in one word of letters, digits and underscores: label = "gather"',
        )
    return label


class _GraphBuilder:
    """Numbers the values and makes the nodes of a `StageGraph`."""

    def __init__(
        self, module: nn.Module, graph: fx.Graph, cutting: Cutting, exchanges: Mapping[str, ExchangeFacts]
    ) -> None:
        self.module, self.graph, self.cutting, self.exchanges = module, graph, cutting, exchanges
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.value_of: dict[Any, int] = {node: number for number, node in enumerate(self.inputs)}

    def build(self) -> StageGraph:
        sorted_nodes: list[tuple[tuple[int, int, int, int], Group | tuple[str, CutNode]]] = [
            ((group.key[0], 0, group.key[1], group.slice[0]), group) for group in self.cutting.groups
        ]
        sorted_nodes += [
            ((cut.level, 1, order, 0), (name, cut)) for order, (name, cut) in enumerate(self.cutting.exchanges)
        ]
        sorted_nodes.sort(key=lambda pair: pair[0])
        nodes = tuple(
            self.segment(item) if isinstance(item, Group) else self.communication(*item) for _, item in sorted_nodes
        )
        (output,) = next(node for node in self.graph.nodes if node.op == "output").args
        result = fx.node.map_aggregate(
            output,
            lambda leaf: Slot(self.value(leaf)) if isinstance(leaf, fx.Node) else leaf,  # type: ignore[arg-type, return-value]
        )
        part = {
            call: number
            for number, (_, item) in enumerate(sorted_nodes)
            for call in (item.nodes if isinstance(item, Group) else (item[1].node,))
        }
        count = len(self.value_of)
        return StageGraph(self.module, nodes, len(self.inputs), count, result, traced=self.graph, part=part)

    def value(self, node: fx.Node) -> int:
        """The number of the value that ``node`` makes. Elements of an exchange's result have numbers of their own."""
        key: Any = node
        if is_element(node, self.exchanges):
            key = node.args
        if key not in self.value_of:
            self.value_of[key] = len(self.value_of)
        return self.value_of[key]

    def is_value(self, node: fx.Node) -> bool:
        """Whether a node's result is a numbered value, rather than copied into the segments that use it."""
        return is_element(node, self.exchanges) or node not in self.cutting.light

    def communication(self, name: str, cut: CutNode) -> Communication:
        node = cut.node
        if node.kwargs or any(argument is not None and not isinstance(argument, fx.Node) for argument in node.args):
            raise PartitionError(
                f"the exchange `{node.target}` is called with something that is not a value of the graph",
                "call an exchange as exchange(route, *tensors), with None for no route",
            )
        takes = tuple(-1 if argument is None else self.value(argument) for argument in node.args)  # type: ignore[arg-type]
        if whole := [user for user in node.users if user.target is not getitem]:
            raise PartitionError(
                f"what the exchange `{node.target}` gives is used as a whole by `{whole[0]}`",
                "unpack it: rows, weights = exchange(route, rows, weights)",
            )
        used = sorted({int(user.args[1]) for user in node.users})  # type: ignore[arg-type]
        gives = []
        for element in used:
            self.value_of.setdefault((node, element), len(self.value_of))
            gives.append(self.value_of[node, element])
        exchange = self.module.get_submodule(str(node.target))
        assert isinstance(exchange, Exchange)
        return Communication(name, exchange, takes, tuple(gives), tuple(used), slice_of(node))

    def segment(self, group: Group) -> Segment:
        """The nodes of a group as a function of the stage's module."""
        inside = set(group.nodes)
        graph = fx.Graph()
        here: dict[fx.Node, fx.Node] = {}
        taken: dict[int, fx.Node] = {}
        for node in self._taken(group, inside):
            number = self.value(node)
            here[node] = taken[number] = taken.get(number) or graph.placeholder(f"value_{number}")

        def lookup(node: fx.Node) -> fx.Node:
            if node not in here:  # parameters and shapes are copied
                here[node] = graph.node_copy(node, lookup)
            return here[node]

        for node in group.nodes:
            here[node] = graph.node_copy(node, lookup)
        outputs = [node for node in group.nodes if any(self._outside(user, inside) for user in node.users)]
        graph.output(tuple(here[node] for node in outputs))
        called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        used = [path for node in graph.nodes for path in node.meta.get(USES, ())]
        modules = dict(self.module.named_modules())
        called += [path for path in used if path in modules]
        read = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        read += [path for path in used if path not in modules]
        return Segment(
            group.name,
            SegmentCode(graph, f"segment {group.name} of {type(self.module).__name__}"),
            tuple(taken),
            tuple(self.value(node) for node in outputs),
            tuple(dict.fromkeys(called)),
            tuple(dict.fromkeys(read)),
            any(node.op != "call_module" or self._differentiable(str(node.target)) for node in group.nodes),
            group.slice,
            any(JOINS in node.meta for node in graph.nodes),
        )

    def _differentiable(self, path: str) -> bool:
        """Whether gradients go through a module, as it says itself."""
        return getattr(self.module.get_submodule(path), "differentiable", True) is not False

    def _taken(self, group: Group, inside: set[fx.Node]) -> list[fx.Node]:
        """The values from outside that a group uses, also through copied nodes, in the order of use."""
        values: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            for source in node.all_input_nodes:
                if source in inside:
                    continue
                if self.is_value(source):
                    values.setdefault(source)
                else:
                    visit(source)

        for node in group.nodes:
            visit(node)
        return list(values)

    def _outside(self, user: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether a user of a value is in another segment, also through nodes that are copied there."""
        if user in inside:
            return False
        if user in self.cutting.light:
            return any(self._outside(other, inside) for other in user.users)
        return True
