"""Traces a model to a torch.fx graph, with blocks and all modules that contain none as single nodes.

Only the code between blocks is traced: blocks may do whatever Python can. The graph holds for all sizes.
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from schedc_runtime.errors import PartitionError
from schedc_runtime.random_numbers.names import name_calls

_REMEDY = (
    "only the code between blocks is traced: move this into a submodule of its own (modules are called, not traced),"
    " or wrap the model as nn.Sequential(first, *blocks, last)"
)


class Traced(NamedTuple):
    """A traced forward. constants: tensors that the traced code made, by get_attr target."""

    graph: fx.Graph
    constants: dict[str, Tensor]


def trace(model: nn.Module, blocks: Sequence[str], inputs: Sequence[str]) -> Traced:
    """The graph of ``model.forward`` over ``inputs``; its other arguments keep their defaults.

    The model is traced in training and in evaluation mode. A flag that equals the mode, as in
    ``functional.dropout(x, p, self.training)``, becomes a node that reads the stage's mode at run time. Raises
    `PartitionError` for a model that takes different paths in the two modes.
    """
    through = _around(blocks)
    traces = []
    for training in (True, False):
        with _mode(model, through, training):
            traces.append(_trace_once(model, through, inputs))
    _merge_modes(traces[0], traces[1], type(model).__name__)
    name_calls(traces[0].graph)
    return traces[0]


def _around(blocks: Sequence[str]) -> frozenset[str]:
    """Names of the modules that contain blocks, which are traced through; the root "" is always among them."""
    names = {""}
    for block in blocks:
        parts = block.split(".")
        names.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return frozenset(names)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, through: frozenset[str], inputs: Sequence[str]) -> None:
        super().__init__()
        self.through, self.inputs = through, inputs

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.through

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # fx would make an argument of every parameter, also of one with a default. `if mask is not None` would then
        # be traced as true for a mask that is never given. fx also cannot see through decorators.
        inputs = {name: self.create_proxy("placeholder", name, (), {}) for name in self.inputs}
        parameters = inspect.signature(root_fn).parameters
        positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and name in inputs]
        if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):  # a stage: forward(self, *values)
            positional += [name for name in inputs if name not in parameters]
        args = [inputs.pop(name) for name in positional]
        return (lambda *_: root_fn(self.root, *args, **inputs)), []


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


def _trace_once(model: nn.Module, through: frozenset[str], inputs: Sequence[str]) -> Traced:
    attributes = set(vars(model))
    try:
        graph = _Tracer(through, inputs).trace(model)
    except Exception as error:
        raise PartitionError(
            f"{type(model).__name__} cannot be traced: {error}{_user_line(error, model, through)}", _REMEDY
        ) from error
    finally:
        # fx leaves tensors that the code made as attributes on the user's model: remove them.
        constants = {name: model.__dict__.pop(name) for name in set(vars(model)) - attributes}
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
        raise PartitionError(f"{owner}.forward makes another tensor each time it runs, between blocks", _REMEDY)
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
                " place of its code between blocks",
                _REMEDY,
            )
        if isinstance(a, dict):
            return {key: merge(value, b[key]) for key, value in a.items()}
        if isinstance(a, (tuple, list)):
            return type(a)(merge(x, y) for x, y in zip(a, b, strict=True))
        return a

    if not same:
        raise PartitionError(
            f"{owner}.forward takes another path in training than in evaluation mode, in its code between blocks",
            _REMEDY,
        )
    with graph.inserting_before(next(iter(graph.nodes))):
        mode.append(graph.create_node("get_attr", "training"))
    for a, b in pairs:
        a.args, a.kwargs = merge(a.args, b.args), merge(a.kwargs, b.kwargs)
    if not mode[0].users:
        graph.erase_node(mode[0])
