"""Cuts the backward graph that AOTAutograd makes: a graph for I, and a graph for W with the weight gradients.

    I    every gradient but those that wait, and the tensors that W reads
    W    products whose results are gradients of parameters, and what follows them

W begins at the operands of its products. A product reads whole tensors, also in a fused backward. The cut therefore
parts no fused loop, and changes no bits. Everything that a product only reads is computed in I, views aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

aten = torch.ops.aten

PRODUCTS = frozenset({
    getattr(aten, name)
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm",
        "convolution_backward", "embedding_dense_backward", "embedding_backward", "_embedding_bag_dense_backward",
        "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "index_add", "scatter_add",
    )
    if hasattr(aten, name)
})  # fmt: skip
"""Operations that make gradients of weights. Decompositions turn those of an embedding into sums at indices."""

VIEWS = frozenset(
    getattr(aten, name)
    for name in (
        "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "squeeze", "t", "transpose",
        "unsqueeze", "view", "_unsafe_view", "reshape",
    )
)  # fmt: skip
"""Operations that W repeats rather than hold their results."""

CASTS = frozenset({aten._to_copy, torch.ops.prims.convert_element_type})
"""Changes of type. W repeats those that widen: what it holds is then smaller."""


class CutGraphs(NamedTuple):
    """A backward graph in two.

    i: takes what the whole graph takes. It returns the whole graph's outputs, None for those that wait, and then
        [computed] values that W reads. w: takes the values at ``positions`` among the whole graph's inputs, then those
        [computed]. It returns the outputs ``waiting``.
    outputs: number of the whole graph's outputs. inputs_of_w: the nodes of the whole graph that W reads.
    Both return one None more than is said here, see `_END`.
    """

    i: fx.GraphModule
    w: fx.GraphModule
    outputs: int
    waiting: tuple[int, ...]
    positions: tuple[int, ...]
    computed: int
    inputs_of_w: tuple[fx.Node, ...]


_END = None
"""Ends the outputs of both graphs. No whole backward has it, so that no cache gives one of these for another."""


def cut_backward(module: fx.GraphModule, candidates: Iterable[int]) -> CutGraphs | None:
    """Cut a backward graph. candidates: numbers of the outputs that are gradients of parameters. None: nothing waits.

    The module is changed: a backward of a convolution becomes two.
    """
    graph = module.graph
    _double_convolutions(graph)
    outputs: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    waiting = _waiting(graph, outputs, set(candidates))
    if not waiting:
        return None
    in_i = _needed(graph, outputs, set(waiting))
    core = _core(graph, [outputs[position] for position in waiting], in_i)
    held, inside = _read_by(core, graph, in_i)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = [node for node in held if node.op == "placeholder"]
    computed = [node for node in held if node.op != "placeholder"]
    w = _graph_of_w(module, [*inputs, *computed], inside, [outputs[position] for position in waiting])
    i = _graph_of_i(module, [None if p in waiting else out for p, out in enumerate(outputs)], computed)
    positions = tuple(placeholders.index(node) for node in inputs)
    return CutGraphs(i, w, len(outputs), tuple(waiting), positions, len(computed), (*inputs, *computed))


def _packet(node: fx.Node) -> Any:
    """The operation of a node, whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def _double_convolutions(graph: fx.Graph) -> None:
    """Give the gradients of a convolution's parameters an operation of their own, and that of its input another."""
    for node in list(graph.nodes):
        if node.op != "call_function" or _packet(node) is not aten.convolution_backward:
            continue
        *args, mask = node.args
        if not (mask[0] and (mask[1] or mask[2])):
            continue
        with graph.inserting_after(node):
            weights = graph.call_function(node.target, (*args, [False, mask[1], mask[2]]))
        weights.meta = _with_values(node.meta, (False, True, True))
        node.args = (*args, [mask[0], False, False])
        node.meta = _with_values(node.meta, (True, False, False))
        for user in list(node.users):
            if user.target is getitem and user.args[1] != 0:
                user.args = (weights, user.args[1])


def _with_values(meta: dict[str, Any], kept: Sequence[bool]) -> dict[str, Any]:
    values = meta.get("val")
    if values is None:
        return dict(meta)
    return {**meta, "val": tuple(value if keep else None for value, keep in zip(values, kept, strict=True))}


def _waiting(graph: fx.Graph, outputs: Sequence[Any], candidates: set[int]) -> list[int]:
    """The outputs that wait: those of the candidates with a product that nothing in I needs."""
    products = _weight_products(graph)
    while True:
        in_i = _needed(graph, outputs, candidates)
        kept = {position for position in candidates if _ancestors([outputs[position]]) & products - in_i}
        if kept == candidates:
            return sorted(kept)
        candidates = kept


def _needed(graph: fx.Graph, outputs: Sequence[Any], candidates: set[int]) -> set[fx.Node]:
    """What I computes if only ``candidates`` wait. What acts on other things than its result stays in I."""
    impure = [node for node in graph.nodes if node.op == "call_function" and _acts(node)]
    return _ancestors([*(out for position, out in enumerate(outputs) if position not in candidates), *impure])


def _acts(node: fx.Node) -> bool:
    """Whether an operation does more than give its result: it writes, draws, or sends."""
    if node.is_impure():
        return True
    tags: Sequence[Any] = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or "collective" in str(node.target)


def _ancestors(nodes: Iterable[Any]) -> set[fx.Node]:
    """The nodes among ``nodes``, and everything that they need."""
    stack = [node for node in nodes if isinstance(node, fx.Node)]
    reached = set(stack)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in reached:
                reached.add(source)
                stack.append(source)
    return reached


def _weight_products(graph: fx.Graph) -> set[fx.Node]:
    """The products of the backward itself. Those of a forward that is repeated depend on no gradient."""
    behind: set[fx.Node] = set()
    products: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(source in behind for source in node.all_input_nodes):
            behind.add(node)
            if node.op == "call_function" and _packet(node) in PRODUCTS:
                products.add(node)
    return products


def _core(graph: fx.Graph, waiting: Sequence[fx.Node], in_i: set[fx.Node]) -> set[fx.Node]:
    """What W computes: the products that only ``waiting`` needs, and what follows them."""
    only_w = _ancestors(waiting) - in_i
    products = _weight_products(graph)
    core: set[fx.Node] = set()
    for node in graph.nodes:
        if node in only_w and (node in products or any(source in core for source in node.all_input_nodes)):
            core.add(node)
    return core


def _read_by(core: set[fx.Node], graph: fx.Graph, in_i: set[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """(nodes whose values W takes, nodes that W runs): the core, and the views and casts in front of it.

    A view that I computes is held as I has it: the view behind it would make the compiler run I's loops otherwise.
    """
    inside, held = set(core), set()
    of_inputs = _views_of_inputs(graph)
    stack = [source for node in core for source in node.all_input_nodes if source not in core]
    while stack:
        node = stack.pop()
        if node in inside or node in held:
            continue
        if _is_repeated(node) and (node not in in_i or node in of_inputs):
            inside.add(node)
            stack += node.all_input_nodes
        else:
            held.add(node)
    return [node for node in graph.nodes if node in held], inside


def _views_of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that need nothing but inputs and what `_is_repeated`."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (_is_repeated(node) and all(source in nodes for source in node.all_input_nodes)):
            nodes.add(node)
    return nodes


def _is_repeated(node: fx.Node) -> bool:
    """Whether W repeats a node instead of holding its value."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or _acts(node):
        return False
    value = node.meta.get("val")
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    if not any(isinstance(source, Tensor) for source in sources):
        return not isinstance(value, Tensor) or _packet(node) in _FILLED
    if _packet(node) in CASTS:
        source = sources[0]
        return isinstance(value, Tensor) and isinstance(source, Tensor) and source.itemsize < value.itemsize
    return _packet(node) in VIEWS


_FILLED = frozenset({aten.full, aten.zeros, aten.ones, aten.empty, aten.new_zeros, aten.scalar_tensor, aten.arange})
"""Operations that fill a new tensor."""


def _graph_of_w(
    module: fx.GraphModule, inputs: Sequence[fx.Node], inside: set[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in inside:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output((*(copies[node] for node in outputs), _END))
    return fx.GraphModule(module, graph)


def _graph_of_i(module: fx.GraphModule, outputs: Sequence[Any], computed: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copies)
    kept = [None if node is None else copies[node] for node in (*outputs, *computed)]
    graph.output((*kept, _END))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)
