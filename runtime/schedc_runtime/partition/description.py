"""Describes a recording as plain values, so that two recordings of one model can be compared node by node."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, fx

from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.partition.plain_numbers import has_symbols
from schedc_runtime.partition.recorder import Recording
from schedc_runtime.partition.structure import Template, storage_of
from schedc_runtime.partition.symbols import NotSymbolic
from schedc_runtime.partition.tensor_hooks import BESIDE
from schedc_runtime.partition.unit_calls import ASSUMED, CHECKPOINTED, TAPS, Apply, ContainerFill
from schedc_runtime.random_numbers.names import NamedCall

Description = tuple[Any, ...]
_NOTES = ("random", "light", "ambient", TAPS, CHECKPOINTED, ASSUMED)


def description_of(recording: Recording) -> Description:
    """Everything that stages are made of: nodes with arguments, results and memory, entries, calls and the output."""
    nodes = {node: number for number, node in enumerate(recording.graph.nodes)}
    memory: dict[int, int] = {}
    for node in nodes:
        if isinstance(value := node.meta.get("val"), Tensor):
            memory.setdefault(storage_of(value), len(memory))
    return (
        [_node(node, nodes, memory) for node in nodes],
        [(name, nodes.get(last, -1)) for name, last in recording.entries],
        [nodes[call] for call in recording.calls],
        recording.assumed,
        recording.inputs,
        _template(recording.output) if recording.output is not None else None,
    )


def equal(a: Any, b: Any) -> bool:
    """Whether two descriptions are the same. Objects of the model are compared by identity, then by value."""
    if a is b:
        return True
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    try:
        return type(a) is type(b) and (_same_function(a, b) if isinstance(a, FunctionType) else bool(a == b))
    except Exception:  # objects that cannot be compared, and functions that keep each other
        return False


def _same_function(a: FunctionType, b: FunctionType) -> bool:
    """Whether two functions come from one line and keep the same values."""
    if a.__code__ is not b.__code__ or a.__globals__ is not b.__globals__:
        return False
    kept = [
        (each.__defaults__, each.__kwdefaults__, [cell.cell_contents for cell in each.__closure__ or ()])
        for each in (a, b)
    ]
    return equal(*kept)


def _node(node: fx.Node, nodes: Mapping[fx.Node, int], memory: Mapping[int, int]) -> Any:
    meta, value = node.meta, node.meta.get("val")

    def number(argument: fx.Node) -> Any:
        return "node", nodes[argument]

    return (
        node.op,
        _target(node.target),
        fx.node.map_arg((node.args, node.kwargs), number),
        [meta.get(note) for note in _NOTES],
        [(event.name, event.active) for event in meta.get("draws", ())],
        sorted(memory.get(storage, -1) for storage in meta.get("mutates", ())),
        [nodes[meta[other]] if other in meta else -1 for other in ("part_of", BESIDE)],
        (TensorSpec.of(value), value.device, memory[storage_of(value)]) if isinstance(value, Tensor) else None,
    )


def _target(target: Any) -> Any:
    if isinstance(target, NamedCall):
        return "named", target.name, target.function
    if isinstance(target, ContainerFill):
        return "built", _template(target.template)
    return ("apply", target.kind) if isinstance(target, Apply) else target


def _template(template: Template) -> Any:
    like = template.like
    if like is None:
        return None
    if has_symbols(like.rest):
        raise NotSymbolic(f"a {like.kind.__name__} keeps a size")
    return like.kind, like.keys, like.rest, [_template(inner) for inner in template.inner]
