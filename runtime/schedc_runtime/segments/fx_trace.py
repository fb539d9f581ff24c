"""Gives a stage as one torch.fx graph, with exchanges and modules without an exchange as single nodes.

A recorded stage has its graph already. Modules with an exchange inside are traced, and their nodes put in place of
their call: exchanges have no meaning for the fake tensors of a recording. Only what is between exchanges is traced.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.recorded_stage import RecordedStage, graft
from schedc_runtime.partition.tensor_hooks import hooked_code
from schedc_runtime.partition.unit_calls import CHECKPOINTED, TAPS
from schedc_runtime.random_numbers.names import NamedCall, name_calls
from schedc_runtime.ranks.exchange import Exchange
from schedc_runtime.segments.declared import declares, expand

_ANY_NODE = "\0 a node"
"""Takes the place of a node where calls are compared."""

_REMEDY = (
    "only the code between exchanges is traced: move this into a submodule of its own (modules are called, not traced),"
    " or let the block declare its segments(), see docs/inside/overlap.md"
)


class Traced(NamedTuple):
    """A traced forward. constants: tensors [...] that the traced code made, by get_attr target."""

    graph: fx.Graph
    constants: dict[str, Tensor]


Traces = dict[tuple[str, str], Traced]
"""Traced forwards of one stage's modules, by path and arguments. Sizes have no part in them."""


def exchanges_in(module: nn.Module) -> bool:
    """Whether ``module`` has an Exchange inside, or is one."""
    return any(isinstance(part, Exchange) for part in module.modules())


def stage_nodes(stage: nn.Module, inputs: int, traces: Traces) -> fx.Graph:
    """The graph of a stage module that takes ``inputs`` values; tensors that its code makes become its buffers.

    Modules with an exchange inside are traced through. Modules with declared parts are replaced by the parts.
    traces: those of the same stage so far; new ones are added. Raises `PartitionError` with the line that cannot be
    traced.
    """
    graph = fx.Graph()
    if isinstance(stage, RecordedStage):
        result = graph.graph_copy(stage.current.graph, {}, return_output_node=True)
        assert isinstance(result, tuple)
        graph.output(result[0])
    else:
        values = tuple(graph.placeholder(f"value_{number}") for number in range(inputs))
        graph.output(_inlined(graph, stage, "", values, {}, traces))
    for node in list(graph.nodes):
        if node.target is hooked_code:
            raise PartitionError(
                "the model registers a hook on a tensor between units, and a stage in segments would give the hook the"
                f" gradient of one segment alone{node.meta.get('line', '')}",
                "register it inside of a unit, or leave out Cut(segmented=True)",
            )
        if node.op != "call_module":
            continue
        module = stage.get_submodule(str(node.target))
        if node.meta.get(CHECKPOINTED) and exchanges_in(module):
            warnings.warn(
                f"checkpoint() around `{node.target}` is not carried into the pipeline, since the block has an exchange"
                " inside: its activations are held; give a plan with `recompute`",
                stacklevel=2,
            )
        if _through(module):
            if node.meta.get(TAPS):
                raise PartitionError(
                    f"a hook takes a tensor out of `{node.target}`, which has an exchange inside",
                    "return the tensor from the block",
                )
            with graph.inserting_before(node):
                _replace(graph, node, _inlined(graph, module, str(node.target), node.args, node.kwargs, traces, stage))
    for node in list(graph.nodes):
        if node.op == "call_module":
            module = stage.get_submodule(str(node.target))
            if declares(module) and exchanges_in(module):
                expand(graph, node, module, Exchange)
    return graph


def _through(module: nn.Module) -> bool:
    return exchanges_in(module) and not isinstance(module, Exchange) and not declares(module)


def _traced_through(module: nn.Module) -> frozenset[str]:
    """The paths, from ``module`` on, of the modules that are traced and not called."""
    through = {""}
    for name, part in module.named_modules():
        if name and name.rpartition(".")[0] in through and _through(part):
            through.add(name)
    return frozenset(through)


def _inlined(
    graph: fx.Graph,
    module: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    traces: Traces,
    stage: nn.Module | None = None,
) -> Any:
    """Put the nodes of a module's forward into ``graph``; returns its result."""
    call = (path, repr(fx.node.map_arg((args, dict(kwargs)), lambda _: _ANY_NODE)))
    if (traced := traces.get(call)) is None:
        traced = traces[call] = _trace(module, _traced_through(module), args, kwargs)
    prefix = f"{path}." if path else ""
    nodes: list[fx.Node] = []
    fx.node.map_aggregate((args, dict(kwargs)), lambda leaf: nodes.append(leaf) if isinstance(leaf, fx.Node) else None)
    here: dict[fx.Node, fx.Node] = {}
    given = iter(nodes)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            here[node] = next(given)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], here.__getitem__)
        else:
            here[node] = copied = graph.node_copy(node, here.__getitem__)
            if isinstance(node.target, NamedCall):
                copied.target = NamedCall(".".join(filter(None, (path, node.target.name))), node.target.function)
            if node.op in ("call_module", "get_attr"):
                copied.target = f"{prefix}{node.target}"
            if node.target in traced.constants:
                copied.target = f"{prefix}{node.target}".replace(".", "_")
                graft(stage or module, copied.target, traced.constants[str(node.target)], persistent=False)
    return None


def _replace(graph: fx.Graph, node: fx.Node, result: Any) -> None:
    """Put the result of an inlined call in place of its node."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _trace(module: nn.Module, through: frozenset[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
    """The graph of a module's forward. Nodes among its arguments become placeholders, in order; the rest is as given.

    The module is traced in training and in evaluation mode. A flag that equals the mode, as in
    ``functional.dropout(x, p, self.training)``, becomes a node that reads the stage's mode at run time. Raises
    `PartitionError` for a module that takes different paths in the two modes.
    """
    traces = []
    for training in (True, False):
        with _mode(module, through, training):
            traces.append(_trace_once(module, through, args, kwargs))
    _merge_modes(traces[0], traces[1], type(module).__name__)
    name_calls(traces[0].graph)
    return traces[0]


class _Proxy(fx.Proxy):
    """A traced value. Unpacking one is frequent, and fx would disassemble the whole calling function each time."""

    def __iter__(self) -> Iterator[fx.Proxy]:
        frame = sys._getframe(1)
        count = _unpacked(frame.f_code, frame.f_lasti)
        if count is None:
            return cast(Iterator[fx.Proxy], self.tracer.iter(self))
        return (self[number] for number in range(count))  # type: ignore[index]


@cache
def _unpacked(code: CodeType, offset: int) -> int | None:
    """The number of names that the instruction at ``offset`` unpacks a value into; None if it does something else."""
    instruction = next(instruction for instruction in dis.get_instructions(code) if instruction.offset == offset)
    return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else None


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def __init__(self, through: frozenset[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.through, self.given = through, (args, dict(kwargs))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.through

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # fx would make an argument of every parameter, also of one with a default. `if mask is not None` would then
        # be traced as true for a mask that is never given. fx also cannot see through decorators.
        def proxy(leaf: Any) -> Any:
            return self.create_proxy("placeholder", leaf.name, (), {}) if isinstance(leaf, fx.Node) else leaf

        args, kwargs = fx.node.map_aggregate(self.given, proxy)
        return (lambda *_: root_fn(self.root, *args, **kwargs)), []


@contextmanager
def _mode(model: nn.Module, through: frozenset[str], training: bool) -> Iterator[None]:
    """Sets the mode of the modules that are traced through, and restores it."""
    modules = [model.get_submodule(name) for name in through]
    before = [module.training for module in modules]
    for module in modules:
        module.training = training
    try:
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode


def _trace_once(module: nn.Module, through: frozenset[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
    attributes = set(vars(module))
    try:
        graph = _Tracer(through, args, kwargs).trace(module)
    except Exception as error:
        raise PartitionError(
            f"{type(module).__name__} cannot be traced: {error}{_user_line(error, module, through)}", _REMEDY
        ) from error
    finally:
        # fx leaves tensors that the code made as attributes on the user's module: remove them.
        constants = {name: module.__dict__.pop(name) for name in set(vars(module)) - attributes}
    return Traced(graph, constants)


def _user_line(error: BaseException, model: nn.Module, through: frozenset[str]) -> str:
    """``FILE:LINE: TEXT`` of the innermost frame in the model's own code; "" if there is none."""
    files = {inspect.getsourcefile(type(model.get_submodule(name))) for name in through}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files and "torch" not in frame.filename.split("/")[-3:]:
            text = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"\n  --> {frame.filename}:{frame.lineno}: {text}"
    return ""


def _merge_modes(training: Traced, evaluation: Traced, owner: str) -> None:
    """Make the graph of ``training`` valid for both modes, or raise `PartitionError`."""
    if training.constants.keys() == evaluation.constants.keys() and not all(
        torch.equal(tensor, evaluation.constants[name]) for name, tensor in training.constants.items()
    ):
        raise PartitionError(f"{owner}.forward makes another tensor each time it runs, between exchanges", _REMEDY)
    graph = training.graph
    pairs = list(zip(graph.nodes, evaluation.graph.nodes, strict=False))
    same = len(graph.nodes) == len(evaluation.graph.nodes) and all(
        (a.op, a.target, a.name) == (b.op, b.target, b.name) for a, b in pairs
    )
    mode: list[fx.Node] = []

    def merge(a: Any, b: Any) -> Any:
        """The argument for both modes: the mode node where it equals the mode."""
        if isinstance(a, fx.Node):
            return a
        if a is True and b is False:
            return mode[0]
        if type(a) is not type(b) or (not isinstance(a, (tuple, list, dict)) and a != b):
            raise PartitionError(
                f"{owner}.forward does something else in training and in evaluation mode: {a!r} and {b!r} at the same"
                " place of its code between exchanges",
                _REMEDY,
            )
        if isinstance(a, dict):
            return {key: merge(value, b[key]) for key, value in a.items()}
        if isinstance(a, (tuple, list)):
            return type(a)(merge(x, y) for x, y in zip(a, b, strict=True))
        return a

    if not same:
        raise PartitionError(
            f"{owner}.forward takes another path in training than in evaluation mode, in its code between exchanges",
            _REMEDY,
        )
    with graph.inserting_before(next(iter(graph.nodes))):
        mode.append(graph.create_node("get_attr", "training"))
    for a, b in pairs:
        a.args, a.kwargs = merge(a.args, b.args), merge(a.kwargs, b.kwargs)
    if not mode[0].users:
        graph.erase_node(mode[0])
