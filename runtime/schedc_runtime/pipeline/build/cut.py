"""Where stages and segments of a model begin: a setting of `Pipeline`, whose arguments are checked by their kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from schedc.ir.program import Program
from schedc.plan.layout.parts import Layout
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.ranks.mesh import Mesh


@dataclass(frozen=True)
class Cut:
    """Where a model is cut; by default into stages of equal numbers of parameters. See `partition`.

    costs: [blocks] or [blocks + 2] what each block costs, in any unit; the largest stage is made as small as can be.
    split_points: [stages - 1] names of the blocks that begin stage 1, 2, ...
    layers: which parts of the model each stage has; by default the layout that the program was compiled with.
    blocks: name of the list whose elements are the blocks; by default the largest.
    inputs: names of the forward's arguments that a batch brings; by default those without a default value.
    segmented: run stages in segments, in the order of cell programs, even in a model without expert layers.
    graphs: capture the launches of segments with static shapes once, and replay them. See `captured`.
    release_others: free the memory of the stages that other ranks hold. The model is then no longer whole.
    """

    costs: Sequence[float] | None = None
    split_points: Sequence[str] | None = None
    layers: Layout | None = None
    blocks: str | None = None
    inputs: Sequence[str] | None = None
    segmented: bool = False
    graphs: bool = False
    release_others: bool = False


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
