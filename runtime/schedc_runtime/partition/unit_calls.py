"""Makes the code of a stage or of a segment, and has what it calls: units, containers, and functions of autograd.

A unit may be checkpointed, and give outputs of its submodules. Its result is checked where a recording could only
assume it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from schedc_runtime.errors import BoundaryError, PartitionError
from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.partition.effects import Ambient, ambient, enter, kept_ambient
from schedc_runtime.partition.structure import Template
from schedc_runtime.partition.user_line import user_line
from schedc_runtime.written_code import function_of

TAPS = "taps"
"""Key in the meta of a call: (submodule, number of the call) of each output besides the result."""
CHECKPOINTED = "checkpointed"
"""Key in the meta of a call: the model has it inside of `torch.utils.checkpoint.checkpoint`."""
ASSUMED = "assumed"
"""Key in the meta of a call: shape and dtype of each tensor of the result, where these were assumed."""


class UnitCall(NamedTuple):
    """How a unit is called.

    path: name of the unit. taps: (submodule, number of the submodule's call in this call). checkpointed: whether the
    backward runs the unit a second time, and holds its inputs alone. assumed: the assumed `specs` of the result.
    """

    path: str
    taps: tuple[tuple[str, int], ...] = ()
    checkpointed: bool = False
    assumed: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, node: fx.Node) -> UnitCall | None:
        """How the call of ``node`` is made; None for a plain call."""
        path, meta = str(node.target), node.meta
        taps = tuple((inner.removeprefix(f"{path}."), number) for inner, number in meta.get(TAPS, ()))
        call = cls(path, taps, meta.get(CHECKPOINTED, False), meta.get(ASSUMED))
        return None if call == cls(path) else call

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The result of ``module``; with taps (result, an output per tap)."""
        run: Callable[..., Any] = partial(_with_taps, module, self.taps) if self.taps else module
        if self.checkpointed and torch.is_grad_enabled():
            result = checkpoint(partial(run, **kwargs), *args, use_reentrant=False)
        else:
            result = run(*args, **kwargs)
        if self.assumed is not None:
            self._check(result[0] if self.taps else result)
        return result

    def _check(self, result: Any) -> None:
        if (returned := specs(result)) != self.assumed:
            raise BoundaryError(
                f"`{self.path}` returned ({_shown(returned)}). Its behaviour depends on input values, so the"
                f" recording assumed a result like the first argument: ({_shown(self.assumed or ())})",
                "return a tensor of the shape and dtype of the first argument, or move what depends on values into a"
                " submodule that does",
            )


def in_checkpoint() -> bool:
    """Whether this line runs inside of a checkpoint that is not reentrant."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def specs(value: Any) -> tuple[Any, ...]:
    """The leaves of a result; a tensor [...] is replaced by its shape and dtype."""
    leaves = Template.of(value)[1]
    return tuple(TensorSpec(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)


def _shown(leaves: Sequence[Any]) -> str:
    return ", ".join(str(leaf) if isinstance(leaf, TensorSpec) else repr(leaf) for leaf in leaves)


def _with_taps(module: nn.Module, taps: Sequence[tuple[str, int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """(result, an output per tap) of a call."""
    outputs: dict[tuple[str, int], Any] = {}

    def keeper(path: str) -> Callable[..., None]:
        calls: list[None] = []

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[path, len(calls)] = output
            calls.append(None)

        return keep

    hooks = [
        module.get_submodule(path).register_forward_hook(keeper(path)) for path in dict.fromkeys(p for p, _ in taps)
    ]
    try:
        result = module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return (result, *(outputs[tap] for tap in taps))


class ContainerFill:
    """Builds a container at run time."""

    def __init__(self, template: Template) -> None:
        self.template, self.__name__ = template, "built"

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return self.template.fill(iter(leaves))


class Apply:
    """Calls a `torch.autograd.Function` at run time."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.__name__ = kind, kind.__name__

    def __call__(self, *args: Any) -> Any:
        return self.kind.apply(*args)


def called(func: Any) -> Any:
    """A torch function, as stage code calls it: a property becomes getattr."""
    if getattr(func, "__name__", "") == "__get__":
        return getattr
    if getattr(func, "__name__", "") == "__set__":
        raise PartitionError(
            f"the attribute `{func.__self__.__name__}` of a tensor is assigned between blocks{user_line()}",
            "do this in a submodule of its own: modules are called, not recorded",
        )
    return func


def hidden(value: Any, where: str) -> PartitionError:
    """The refusal of an object that keeps tensors. where: what it was given to."""
    kind = type(value).__name__
    cache = "cache" in kind.lower() or "cache" in where or "past" in where
    return PartitionError(
        f"{where} is a {kind} that keeps tensors: state that microbatches and stages would share",
        "give use_cache=False, in the batch or in the model's configuration"
        if cache
        else "pass tensors, or tuples, lists, dicts and dataclasses of tensors",
    )


class CompiledGraph(NamedTuple):
    """A compiled graph. run(owner, *inputs): owner is the module with the parameters, buffers and submodules."""

    run: Callable[..., Any]
    source: str


def compiled_code(graph: fx.Graph, name: str) -> CompiledGraph:
    """The function of a graph, with the stage module as its first argument. name: of the file in tracebacks."""
    writer = _Writer(graph)
    source = "\n    ".join([f"def forward({', '.join(['self', *writer.inputs])}):", *writer.lines()]) + "\n"
    run: Callable[..., Any] = function_of("forward", source, f"<{name}>", writer.constants)
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
