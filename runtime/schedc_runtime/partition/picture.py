"""Draws a partition: the stages with their modules and parameters, and the values that cross each boundary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import prod

from graphviz import Digraph
from torch import nn
from torch.utils import _pytree as pytree

from schedc.drawing.graph import lines, new_graph
from schedc.ir.placement import Placement
from schedc.units import shown
from schedc_runtime.partition.boundary import Boundary, Constant, TensorSpec
from schedc_runtime.partition.shared import StageModules

_MOST_ROWS = 24
"""Largest number of rows of a stage or a boundary: more would make the picture too tall."""
_BARE = {"shape": "plain", "style": "", "class": "bare"}


def partition_graph(
    partition: StageModules, boundaries: Sequence[Boundary] | None = None, placement: Placement | None = None
) -> Digraph:
    """A box per stage and an edge per boundary, from the model's inputs at the top to its output.

    boundaries: [stages + 1] of one microbatch; they add shapes, dtypes and bytes to the names of values. placement: of
    the stages, which adds ranks.
    """
    whole = _Counted.of(parameter for module in partition.modules for parameter in module.parameters())
    graph = new_graph("partition", [f"{partition.stages} stages, {whole}"], "TB")
    graph.attr("edge", fontname="monospace")
    for stage, module in enumerate(partition.modules):
        head = f"stage {stage}{_home(stage, placement)}: {_Counted.of(module.parameters())}"
        rows = list(_contents(module, partition.blocks[stage])) or ["nothing: passes on what it gets"]
        graph.node(f"s{stage}", lines([head, *_some(rows, "parts")]))
    graph.node("input", lines(["input"], "n"), **_BARE)
    graph.node("output", lines(["output"], "n"), **_BARE)
    ends = ["input", *(f"s{stage}" for stage in range(partition.stages)), "output"]
    names = [partition.inputs, *partition.values, ("output",)]
    for stage, (before, after) in enumerate(pairwise(ends)):
        rows = list(_crossing(boundaries[stage], names[stage])) if boundaries else list(names[stage])
        total = list(_total(boundaries[stage], 0 < stage < partition.stages)) if boundaries else []
        graph.edge(before, after, label=lines([*_some(rows, "values"), *total], indent="  "))
    return graph


class _Counted(tuple[int, int]):
    """(number of scalars, bytes) of parameters, each parameter counted once."""

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> _Counted:
        once = {id(p): p for p in parameters}.values()
        return cls((sum(p.numel() for p in once), sum(p.numel() * p.element_size() for p in once)))

    def __str__(self) -> str:
        return f"{self[0]:,} parameters, {shown(self[1])}"


def _home(stage: int, placement: Placement | None) -> str:
    """`` on rank 3``; `` on ranks 0 and 7`` for a stage with two copies."""
    if placement is None:
        return ""
    ranks = sorted(set(placement.rank_of_stage[:, stage].tolist()))
    return f" on rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"


def _contents(module: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Rows of the blocks of a stage and its other parts with parameters, in order; equal blocks share a row."""
    around = {"", *(block[:at] for block in blocks for at, letter in enumerate(block) if letter == ".")}
    parts: dict[str, dict[int, nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parts.setdefault(_part(name, blocks, around), {})[id(parameter)] = parameter
    rows = [
        (name, _kind(module, name), _Counted.of(parameters.values()), "" if name in blocks else name)
        for name, parameters in parts.items()
    ]
    for (kind, counted, _), run in groupby(rows, key=lambda row: row[1:]):
        names = [row[0] for row in run]
        if len(names) == 1:
            yield f"{names[0]}: {kind}, {counted}"
        else:
            yield f"{names[0]} to {names[-1]}: {len(names)} {kind}, each {counted}"


def _part(parameter: str, blocks: Sequence[str], around: set[str]) -> str:
    """The block that has a parameter; else the outermost module around it without a block; else the parameter."""
    if block := next((block for block in blocks if parameter.startswith(f"{block}.")), ""):
        return block
    ends = (at for at, letter in enumerate(parameter) if letter == ".")
    return next((parameter[:at] for at in ends if parameter[:at] not in around), parameter)


def _kind(module: nn.Module, name: str) -> str:
    for word in name.split("."):
        inner = getattr(module, word, None)
        if not isinstance(inner, nn.Module):
            return "a parameter"
        module = inner
    return type(module).__name__


def _crossing(boundary: Boundary, names: Sequence[str]) -> Iterator[str]:
    """Rows of a boundary, one per leaf: ``hidden: float32[2, 16, 64], 8.192 KB``. Constants are marked."""
    values = pytree.tree_unflatten(list(range(len(boundary.entries))), boundary.tree)
    if not isinstance(values, tuple) or len(values) != len(names):
        values, names = (values,), (", ".join(names),)
    for name, value in zip(names, values, strict=True):
        for at in pytree.tree_leaves(value):
            entry = boundary.entries[at]
            if isinstance(entry, Constant):
                yield f"{name}: {entry.value!r}, the same in every microbatch"
            else:
                yield f"{name}: {entry}, {shown(_bytes([entry]))}"


def _total(boundary: Boundary, between_stages: bool) -> Iterator[str]:
    """Bytes of a microbatch's activations and, between stages, of the gradients that come back."""
    if between_stages:
        yield f"forward {shown(_bytes(boundary.tensors))}, backward {shown(_bytes(boundary.gradients))}"
    elif len(boundary.tensors) > 1:
        yield f"in all {shown(_bytes(boundary.tensors))}"


def _bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def _some(rows: list[str], what: str) -> list[str]:
    """The rows; or the first rows and the number of those left out."""
    shown_rows = rows if len(rows) <= _MOST_ROWS else rows[: _MOST_ROWS - 1]
    left = len(rows) - len(shown_rows)
    return [*shown_rows, *([f"and {left} more {what}"] if left else [])]
