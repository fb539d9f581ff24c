"""Parts that a block declares by hand where it cannot be traced, in the order in which they run.

    class Block(nn.Module):
        def segments(self) -> list[DeclaredPart]:
            return [
                DeclaredPart("before", ("x",), ("h", "index", "weight")),   # a method of the block
                DeclaredPart("routing", (None, "index"), ("everyone",)),    # an Exchange, by its attribute
                ...
                DeclaredPart("after", ("h", "rows"), ("output",)),
            ]

The names of the first part's inputs are those of the block's arguments; the last part's outputs are the block's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

from torch import fx, nn

from schedc_runtime.errors import PartitionError


class DeclaredPart(NamedTuple):
    """One step of a block.

    call: name of a submodule or of a method of the block. inputs: names of values, or None to pass None.
    outputs: names of the results; several names are the elements of a returned tuple, in order. An Exchange always
    returns a tuple, so that a single name means its first element.
    uses: submodules and parameters that a method uses; by default all that no part calls. Weight gradients of a layer
    that several parts use are computed when all of these parts are done.
    """

    call: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    uses: tuple[str, ...] | None = None


USES = "schedc_uses"
"""Key in a node's meta: paths of the submodules and parameters that a declared method uses."""


def declares(module: nn.Module) -> bool:
    """Whether ``module`` declares its segments by hand."""
    return callable(getattr(module, "segments", None))


def expand(graph: fx.Graph, node: fx.Node, block: nn.Module, exchange: type) -> None:
    """Replace the ``node`` that calls a block by the block's parts."""
    path = str(node.target)
    parts: Sequence[DeclaredPart] = block.segments()  # type: ignore[operator]
    if not parts:
        raise PartitionError(
            f"`{path}`: segments() gives no part", "list every part of the block, see docs/inside/overlap.md"
        )
    values: dict[str, Any] = {**dict(zip(_arguments(parts), node.args, strict=False)), **node.kwargs}
    calls = {part.call for part in parts}
    own = [*dict(block.named_children()), *dict(block.named_parameters(recurse=False))]
    others = [name for name in own if name not in calls]
    result: Any = None
    with graph.inserting_before(node):
        owner = graph.create_node("get_attr", path)
        for part in parts:
            taken = _taken(part, values, path)
            called = getattr(block, part.call, None)
            if isinstance(called, nn.Module):
                step = graph.create_node("call_module", f"{path}.{part.call}", taken)
            elif callable(called):
                step = graph.create_node("call_method", part.call, (owner, *taken))
                step.meta[USES] = [f"{path}.{name}" for name in (others if part.uses is None else part.uses)]
            else:
                raise PartitionError(
                    f"`{path}` has no submodule and no method `{part.call}`, a part of its segments()",
                    "name an attribute that is an nn.Module, or a method",
                )
            several = isinstance(called, exchange) or len(part.outputs) > 1
            results = tuple(
                graph.create_node("call_function", getitem, (step, element)) if several else step
                for element in range(len(part.outputs))
            )
            values |= dict(zip(part.outputs, results, strict=True))
            result = results
    if len(result) == 1:
        node.replace_all_uses_with(result[0])
    else:
        _replace_elements(graph, node, result)
    graph.erase_node(node)


def _taken(part: DeclaredPart, values: Mapping[str, Any], path: str) -> tuple[Any, ...]:
    """The arguments of a part."""
    if unknown := [name for name in part.inputs if name is not None and name not in values]:
        raise PartitionError(
            f"`{path}`: part `{part.call}` takes {unknown}, which no part before it gives",
            f"known there: {', '.join(values) or 'nothing'}",
        )
    return tuple(None if name is None else values[name] for name in part.inputs)


def _replace_elements(graph: fx.Graph, node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Replace the elements of a call that returned a tuple by the parts' outputs."""
    for user in list(node.users):
        if user.target is not getitem or not isinstance(user.args[1], int):
            raise PartitionError(f"`{node.target}` returns {len(results)} values, of which `{user}` does not take one")
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)


def _arguments(parts: Sequence[DeclaredPart]) -> list[str]:
    """Names of the block's arguments, in order: the inputs that no earlier part outputs."""
    outputs: set[str] = set()
    arguments: list[str] = []
    for part in parts:
        inputs = [name for name in part.inputs if name is not None and name not in outputs]
        arguments += [name for name in inputs if name not in arguments]
        outputs |= set(part.outputs)
    return arguments
