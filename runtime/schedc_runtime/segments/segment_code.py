"""Makes the code of a segment, and lets the calls between its modules run as modules of their own, which may be fused.

x = self.attention(y)
z = self.dropout(x)        neighbours that a chain may be made of: one module, called once
w = z + y
v = self.norm(w)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd as _Dropout

from schedc_runtime.partition.uniform_calls import call_of
from schedc_runtime.partition.unit_calls import compiled_code
from schedc_runtime.random_numbers.names import NamedCall

_BEGINS = ("cat", "dropout", "erf", "gelu", "scaled_dot_product_attention", "silu", "tanh")
"""Every chain of operations has one of these functions."""
Fuse = Callable[[nn.Module, str], Callable[..., tuple[Any, ...]]]
"""(module of neighbours, name of the module whose code draws) -> what runs in its place."""


class SegmentCode:
    """The code of a segment. Called with the stage's module and values, it returns the segment's results as a tuple."""

    def __init__(self, graph: fx.Graph, title: str) -> None:
        self.graph, self.title = graph, title
        self._plain: Callable[..., tuple[Any, ...]] = compiled_code(graph, title).run
        self._run = self._plain

    def __call__(self, module: nn.Module, *values: Any) -> tuple[Any, ...]:
        results: tuple[Any, ...] = self._run(module, *values)
        return results

    def fuse(self, owner: nn.Module, fuse: Fuse | None, opaque: Collection[str] = ()) -> None:
        """Let the calls between modules of ``owner`` run as ``fuse`` says; None: as the model has them.

        opaque: paths of modules whose results are taken by no chain.
        """
        self._run = self._plain
        if fuse is None:
            return
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.graph, copies)
        graph.output(result)
        found = [part for part in _neighbours(self.graph, owner) if not _taken_from(part, opaque)]
        for nodes in found:
            _replace(graph, [copies[node] for node in nodes], owner, fuse)
        if found:
            self._run = compiled_code(graph, f"{self.title}, fused").run


def _neighbours(graph: fx.Graph, owner: nn.Module) -> Iterator[list[fx.Node]]:
    """Calls that follow each other and may be one module: of functions that chains have, and of modules like them."""
    group: list[fx.Node] = []
    for node in graph.nodes:
        if _in_chains(node, owner):
            group.append(node)
            continue
        if len(group) > 1 and any(_begins(each) for each in group):
            yield group
        group = []


def _in_chains(node: fx.Node, owner: nn.Module) -> bool:
    if node.meta.get("ambient") is not None:
        return False
    if node.op == "call_module":
        return _is_like_function(owner.get_submodule(str(node.target)))
    call = call_of(node)
    return call is not None and not (call.name == "getitem" and isinstance(call.args[1], int))


def _is_like_function(part: nn.Module) -> bool:
    return isinstance(part, _Dropout) or (
        type(part).__module__ == "torch.nn.modules.activation" and next(part.parameters(), None) is None
    )


def _begins(node: fx.Node) -> bool:
    call = call_of(node)
    return node.op == "call_module" or (call is not None and call.name in _BEGINS)


def _taken_from(nodes: Sequence[fx.Node], opaque: Collection[str]) -> bool:
    return any(
        source.op == "call_module" and source.target in opaque for node in nodes for source in node.all_input_nodes
    )


def _replace(graph: fx.Graph, nodes: Sequence[fx.Node], owner: nn.Module, fuse: Fuse) -> None:
    """Put one call of a module in the place of ``nodes``."""
    inside, inner = set(nodes), fx.Graph()
    inputs = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
    here = {node: inner.placeholder(node.name) for node in inputs}
    for node in nodes:
        here[node] = inner.node_copy(node, here.__getitem__)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    inner.output(tuple(here[node] for node in outputs))
    drawn = [node.target.name for node in nodes if isinstance(node.target, NamedCall)]
    call: Any = fuse(fx.GraphModule(owner, inner, "neighbours"), drawn[0] if drawn else "")
    with graph.inserting_after(nodes[-1]):
        whole = graph.create_node("call_function", call, tuple(inputs), {}, "chains")
    for number, node in reversed(list(enumerate(outputs))):
        with graph.inserting_after(whole):
            element = graph.call_function(_element, (whole, number))
        node.replace_all_uses_with(element, lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def _element(values: tuple[Any, ...], number: int) -> Any:
    return values[number]
