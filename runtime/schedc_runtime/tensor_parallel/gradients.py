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

if TYPE_CHECKING:
    from schedc_runtime.partition.recorder import Recording


class Gradients:
    """The classes of a model's parameters. A later recording must agree with the first."""

    def __init__(self, model: nn.Module, cores: Sequence[Core], head: str) -> None:
        self._model, self._cores, self._head = model, frozenset(core.path for core in cores), head
        self._parts = frozenset(
            f"{each.path}.{name}"
            for core in cores
            for each in (*core.into, core.out)
            for name, _ in each.module.named_parameters()
        )

    def read(self, recording: Recording) -> None:
        """Mark the parameters whose gradients are whole: ``tensor_complete``.

        Raises `PartitionError` for a parameter of both classes, and for rows that meet between cores.
        """
        modules = dict(self._model.named_modules())
        inside = _inside(recording.graph, modules)
        refuse_meeting_rows(recording.graph, inside, modules, self._cores)
        classes: dict[int, tuple[bool, str]] = {}
        for node in recording.graph.nodes:
            for path, parameter in self._parameters(node, modules):
                partial = node in inside if node.op == "call_module" else any(user in inside for user in node.users)
                partial = partial or _reaches(node, inside, modules)
                known = classes.setdefault(id(parameter), (partial, path))
                marked = getattr(parameter, "tensor_complete", None)
                if known[0] != partial or marked not in (None, not partial):
                    raise PartitionError(
                        f"`{path}` is used both where its gradient is whole and where it is a part of a sum over tensor"
                        " ranks",
                        "use a parameter of its own for each, or take one tensor rank",
                    )
                parameter.tensor_complete = not partial  # type: ignore[attr-defined]

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


def _inside(graph: fx.Graph, modules: dict[str, nn.Module]) -> frozenset[fx.Node]:
    """The nodes between `enter` and `collect`: behind `enter`, and not behind `collect`."""
    inside: set[fx.Node] = set()
    for node in graph.nodes:
        behind = _is_of(node, modules, Enter) or any(source in inside for source in node.all_input_nodes)
        if behind and not _is_of(node, modules, Collect):
            inside.add(node)
    return frozenset(inside)


def _reaches(node: fx.Node, inside: frozenset[fx.Node], modules: dict[str, nn.Module]) -> bool:
    """Whether a result leads to a node inside past `enter`, differentiably."""
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user in seen or _is_of(user, modules, Enter):
                continue
            if user in inside:
                return True
            value: Any = user.meta.get("val")
            if not isinstance(value, Tensor) or value.requires_grad:
                seen.add(user)
                waiting.append(user)
    return False
