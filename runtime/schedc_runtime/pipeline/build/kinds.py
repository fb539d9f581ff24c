"""Refuses arguments of a `Pipeline` that are not of its kinds, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from schedc.ir.program import Program
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.build.cut import Cut
from schedc_runtime.ranks.mesh import Mesh


class _Kind(NamedTuple):
    """fits: whether a value is of the kind. what: the kind, for messages."""

    fits: Callable[[Any], bool]
    what: str
    remedy: str


def _optional(kind: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kind)


_KINDS = {
    "model": _Kind(lambda value: isinstance(value, nn.Module), "an nn.Module", "pass the model itself, constructed"),
    "program": _Kind(
        lambda value: isinstance(value, Program), "a compiled program", "write schedc.compile('zbh1', P=4, M=8)"
    ),
    "loss_fn": _Kind(
        lambda value: value is None or callable(value), "a function", "pass loss_fn(output, target), or None"
    ),
    "count_fn": _Kind(callable, "a function", "pass count_fn(targets), or leave it out"),
    "cut": _Kind(_optional(Cut), "a Cut", "write cut=Cut(split_points=[...])"),
    "mesh": _Kind(_optional(Mesh), "a Mesh", "write mesh=Mesh(pipeline, data=replicas)"),
}
"""By argument."""


def check_kinds(**arguments: Any) -> None:
    """Raise `RuntimeFault` for the first argument that is of another kind than it must be."""
    for name, value in arguments.items():
        kind = _KINDS[name]
        if not kind.fits(value):
            shown = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            raise RuntimeFault(f"{name} is {shown}, not {kind.what}", kind.remedy)
