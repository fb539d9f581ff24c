"""Compiles the graph of a stage, or of a segment, to a Python function that frees values after their last use."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

from torch import fx

from schedc_runtime.partition.effects import Ambient, ambient, enter, kept_ambient
from schedc_runtime.partition.unit_calls import UnitCall


class CompiledGraph(NamedTuple):
    """A compiled graph. run(owner, *inputs): owner is the module whose parts it uses."""

    run: Callable[..., Any]
    source: str


def compiled_code(graph: fx.Graph, name: str) -> CompiledGraph:
    """The function of a graph, with the stage module as its first argument. name: of the file in tracebacks."""
    writer = _Writer(graph)
    source = "\n    ".join([f"def forward({', '.join(['self', *writer.inputs])}):", *writer.lines()]) + "\n"
    filename = f"<{name}>"
    # Tracebacks then show the generated line.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names = dict(writer.constants)
    exec(compile(source, filename, "exec"), names)
    run: Callable[..., Any] = names["forward"]
    if writer.states:
        run = _with_ambient(run, tuple(writer.states))
    return CompiledGraph(run, source)


def attribute_code(base: str, path: str) -> str:
    """The expression of an attribute: parts of a path that are no identifiers go through getattr."""
    for word in path.split("."):
        base = f"{base}.{word}" if word.isidentifier() else f"getattr({base}, {word!r})"
    return base


class _Writer:
    """Writes a graph line by line."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.constants: dict[str, Any] = {}
        self.states: list[Ambient] = []
        self.inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
        self._last = {source: node for node in graph.nodes for source in node.all_input_nodes}

    def lines(self) -> Iterator[str]:
        state: Ambient | None = None
        for node in self.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                yield from self._change(state, None)
                yield f"return {self.text(node.args[0])}"
                return
            if (wanted := node.meta.get("ambient")) != state:
                yield from self._change(state, wanted)
                state = wanted
            yield f"{node.name} = {self._expression(node)}"
            done = [source.name for source in node.all_input_nodes if self._last[source] is node]
            done += [] if node.users else [node.name]
            if done:
                yield f"del {', '.join(done)}"
        yield "return None"

    def _expression(self, node: fx.Node) -> str:
        args = [self.text(argument) for argument in node.args]
        given = ", ".join(
            [
                *args,
                *(
                    f"**{{{key!r}: {self.text(value)}}}" if not key.isidentifier() else f"{key}={self.text(value)}"
                    for key, value in node.kwargs.items()
                ),
            ]
        )
        if node.op == "get_attr":
            return attribute_code("self", str(node.target))
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({given.partition(', ')[2]})" if len(args) else ""
        if node.op == "call_function":
            return f"{self._constant(node.target)}({given})"
        called = attribute_code("self", str(node.target))
        if (unit := UnitCall.of(node)) is not None:
            return f"{self._constant(unit)}({', '.join([called, *([given] if given else [])])})"
        return f"{called}({given})"

    def text(self, value: Any) -> str:
        """The expression of an argument."""
        if isinstance(value, fx.Node):
            return value.name
        if value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value)):
            return repr(value)
        if type(value) is slice:
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return f"({''.join(f'{self.text(item)}, ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, Mapping) and type(value).__name__ in ("dict", "immutable_dict"):
            return f"{{{', '.join(f'{self.text(key)}: {self.text(item)}' for key, item in value.items())}}}"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        for name, known in self.constants.items():
            if known is value:
                return name
        name = f"{getattr(value, '__name__', 'constant')}"
        name = f"{name if name.isidentifier() else 'constant'}_{len(self.constants)}_"
        self.constants[name] = value
        return name

    def _change(self, before: Ambient | None, wanted: Ambient | None) -> Iterator[str]:
        """Lines that change the state around what follows; None is the state around the stage."""
        if before is None and wanted is None:
            return
        if wanted is None:
            yield f"{self._constant(enter)}(outer)"
            return
        if not self.states:
            yield f"outer = {self._constant(ambient)}()"
        self.states.append(wanted)
        yield f"{self._constant(enter_inside)}({self._constant(wanted)}, outer)"


def enter_inside(wanted: Ambient, outer: Ambient) -> None:
    """Set a state; gradients stay off where they are off around the stage, as in an evaluation."""
    enter(wanted._replace(gradients=wanted.gradients and outer.gradients))


def _with_ambient(run: Callable[..., Any], states: tuple[Ambient, ...]) -> Callable[..., Any]:
    def forward(*values: Any) -> Any:
        with kept_ambient(states):
            return run(*values)

    return forward
