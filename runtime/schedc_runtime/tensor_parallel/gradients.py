"""Which gradients are whole on every tensor rank, and which are partial sums, by the graph of a recording.

The gradient of a parameter that is used between `enter` and `collect`, and is not split, is a partial sum over tensor
ranks. The same holds for a parameter whose result a core takes past `enter`. All others are whole on every rank, and
alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.tensor_parallel.exchanges import Collect, Enter
from schedc_runtime.tensor_parallel.rows import refuse_meeting_rows
from schedc_runtime.tensor_parallel.styles import Core
from schedc_runtime.tensor_parallel.vocabulary import Vocabulary

if TYPE_CHECKING:
    from schedc_runtime.partition.recorder import Recording


class Gradients:
    """The classes of a model's parameters. A later recording must agree with the first."""

    def __init__(self, model: nn.Module, cores: Sequence[Core], vocabulary: Vocabulary) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._cores = frozenset([*(core.path for core in cores), vocabulary.head])
        named = model.named_parameters(remove_duplicate=False)
        self._parts = frozenset(name for name, parameter in named if hasattr(parameter, "tensor_parallel"))

    def read(self, recording: Recording) -> None:
        """Mark the parameters whose gradients are whole: ``tensor_complete``.

        Raises `PartitionError` for a parameter of both classes, and for rows that meet between cores.
        """
        modules = dict(self._model.named_modules())
        inside = _inside(recording.graph, modules, self._vocabulary.head if self._vocabulary.columns else "")
        refuse_meeting_rows(recording.graph, inside, modules, self._cores)
        classes: dict[int, tuple[bool, str]] = {}
        self._refuse_split(recording.graph, inside, modules)
        for node in recording.graph.nodes:
            for path, parameter in self._parameters(node, modules):
                ways = (
                    {True} if node.op == "call_module" and node in inside else _ways(node, inside, modules) or {False}
                )
                partial = True in ways
                known = classes.setdefault(id(parameter), (partial, path))
                marked = getattr(parameter, "tensor_complete", None)
                if len(ways) > 1 or known[0] != partial or marked not in (None, not partial):
                    raise PartitionError(
                        f"`{path}` is used both where its gradient is whole and where it is a part of a sum over tensor"
                        " ranks",
                        "use a parameter of its own for each, or take one tensor rank",
                    )
                parameter.tensor_complete = not partial  # type: ignore[attr-defined]

    def _refuse_split(self, graph: fx.Graph, inside: frozenset[fx.Node], modules: dict[str, nn.Module]) -> None:
        """Refuse a split parameter that is read without its module, and a split table that cores take past `enter`."""
        table = self._vocabulary.embedding
        for node in graph.nodes:
            target = str(node.target)
            if node.op == "get_attr" and target in self._parts:
                raise PartitionError(
                    f"`{target}` is split over tensor ranks, and read without a call of the module",
                    "call the module, or keep it whole in the plan of styles",
                )
            if table and target == table and True in _ways(node, inside, modules):
                raise PartitionError(
                    f"what `{table}` looks up enters cores beside the hidden state: its gradient is a part of a sum",
                    'keep the table whole: write the style "replicate"',
                )

    def _parameters(self, node: fx.Node, modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that a node uses and that are not split, with their paths."""
        target = str(node.target)
        if node.op == "call_module":
            for name, parameter in modules[target].named_parameters():
                if f"{target}.{name}" not in self._parts:
                    yield f"{target}.{name}", parameter
        elif node.op == "get_attr":
            owner, _, name = target.rpartition(".")
            value = getattr(modules[owner], name, None)
            if isinstance(value, nn.Parameter):
                yield target, value


def _is_of(node: fx.Node, modules: dict[str, nn.Module], kind: type[nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(modules[str(node.target)], kind)


def _inside(graph: fx.Graph, modules: dict[str, nn.Module], last: str) -> frozenset[fx.Node]:
    """The nodes between `enter` and `collect`: behind `enter`, and not behind `collect`.

    last: the head, where the loss takes own columns of its logits and nothing is collected; else "".
    """
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        behind = _is_of(node, modules, Enter) or any(source in inside for source in node.all_input_nodes)
        if behind and not _is_of(node, modules, Collect) and str(node.target) != last:
            inside.add(node)
    return frozenset(inside)


def _ways(node: fx.Node, inside: frozenset[fx.Node], modules: dict[str, nn.Module]) -> set[bool]:
    """The ways in which gradients of a result come back: whole (False), as parts of a sum (True), or both."""
    ways, seen, waiting = set[bool](), {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            value: Any = user.meta.get("val")
            if user.op == "output" or _is_of(user, modules, Enter):
                ways.add(False)
            elif user in inside:
                ways.add(True)
            elif user not in seen and (not isinstance(value, Tensor) or value.requires_grad):
                seen.add(user)
                waiting.append(user)
    return ways
