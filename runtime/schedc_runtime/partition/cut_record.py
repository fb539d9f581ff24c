"""A recording that was cut into stages, and the record of each input signature that it holds for.

What follows from the sizes of a batch is put in for each signature: shapes of boundaries, and numbers in the code of
stages that have some. Stages without size-dependent numbers share one code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from schedc_runtime.partition.boundary import Boundary, Constant, TensorSpec
from schedc_runtime.partition.output_stages import EarlyOutput
from schedc_runtime.partition.recorded_stage import StageCode
from schedc_runtime.partition.recorder import Recording
from schedc_runtime.partition.split import CutRecording
from schedc_runtime.partition.symbols import Values, has_sizes, settled
from schedc_runtime.partition.unit_calls import ASSUMED, CompiledGraph, compiled_code
from schedc_runtime.random_numbers.counting import DrawEvent


@dataclass(frozen=True, eq=False)
class Record:
    """A model as it was recorded and cut for one input signature.

    boundaries: [stages + 1]. inputs: names of the arguments. values: [stages - 1] names of the values that cross.
    codes: [stages]. parameters: [stages] names of the parameters and modules that each stage uses. assumed: submodules
    whose output was taken to have the shape of their first argument; the sender's check of shapes holds it.
    draws: [stages] draws of random numbers, in the order of the model.
    slices: by number of slices, [stages + 1] boundaries of one slice of a microbatch, where stages run in slices.
    """

    boundaries: tuple[Boundary, ...]
    inputs: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    codes: tuple[StageCode, ...]
    parameters: tuple[frozenset[str], ...]
    assumed: tuple[str, ...]
    draws: tuple[tuple[DrawEvent, ...], ...]
    slices: Mapping[int, tuple[Boundary, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CutModel:
    """A recording of a model, cut. cuts: its graphs per stage."""

    model: nn.Module
    cuts: CutRecording

    @property
    def recording(self) -> Recording:
        return self.cuts.recording

    @cached_property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """[stages] with a `SizeTerm` in the place of what follows from sizes."""
        return tuple(self.cuts.graph(stage) for stage in range(self.cuts.stages))

    @cached_property
    def parameters(self) -> tuple[frozenset[str], ...]:
        """[stages] names of the parameters and modules that each stage uses."""
        return tuple(frozenset(_used(graph, self.model)) for graph in self.graphs)

    @cached_property
    def _draws(self) -> tuple[tuple[DrawEvent, ...], ...]:
        return self.cuts.draws()

    @cached_property
    def _fixed(self) -> tuple[CompiledGraph | None, ...]:
        """[stages] the code of those without a `SizeTerm`."""
        return tuple(
            None if any(map(_changes, graph.nodes)) else self._compiled(stage, graph)
            for stage, graph in enumerate(self.graphs)
        )

    def record(self, named: Mapping[str, Any], values: Values) -> Record:
        """The record of a batch. named: its arguments. values: the size of each symbol in the batch."""
        recording = self.recording
        if recording.conditions is not None:
            recording.conditions.leave(values)
        nodes = self.cuts.crossing
        names = tuple(tuple(node.name for node in crossing) for crossing in nodes)
        return Record(
            self._boundaries(named, names, values),
            recording.inputs,
            names,
            tuple(self._code(stage, values) for stage in range(self.cuts.stages)),
            self.parameters,
            tuple(dict.fromkeys(recording.assumed)),
            self._draws,
        )

    def _code(self, stage: int, values: Values) -> StageCode:
        graph, code = self.graphs[stage], self._fixed[stage]
        if code is None:
            graph = _settled(graph, values)
            code = self._compiled(stage, graph)
        entering = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
        shapes = tuple(settled(tuple(x.shape), values) if isinstance(x, Tensor) else None for x in entering)
        return StageCode(graph, code, self._finish_of(stage), shapes)

    def _finish_of(self, stage: int) -> Callable[[Any], Any] | None:
        """What makes the result of a stage of what its graph returns; None where that is the result."""
        last, own = stage == self.cuts.stages - 1, self.cuts.output_of(stage)
        if own is None:
            return self._finish if last else None
        placed = self.cuts.placed
        assert placed is not None
        filled = partial(placed.filled, own)
        return filled if last else lambda result: EarlyOutput(result[0], filled(result[1]))

    def _compiled(self, stage: int, graph: fx.Graph) -> CompiledGraph:
        return compiled_code(graph, f"stage {stage} of {type(self.model).__name__}")

    def _finish(self, leaves: Any) -> Any:
        assert self.recording.output is not None
        return self.recording.output.fill(iter(leaves))

    def _boundaries(
        self, named: Mapping[str, Any], names: Sequence[tuple[str, ...]], values: Values
    ) -> tuple[Boundary, ...]:
        (leaves,) = next(node for node in self.recording.graph.nodes if node.op == "output").args
        between = [
            boundary_of(tuple(node.meta["val"] for node in nodes), of_nodes, values)
            for nodes, of_nodes in zip(self.cuts.crossing, names, strict=True)
        ]
        values_of = [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        output = self._finish(values_of)
        if (own := self.cuts.output_of(self.cuts.stages - 1)) is not None:
            output = output[own]
        return (
            boundary_of(tuple(named.values()), self.recording.inputs, values),
            *between,
            boundary_of(output, ("output",), values),
        )


def boundary_of(value: Any, names: tuple[str, ...], sizes: Values) -> Boundary:
    """The boundary of a value: nested containers of tensors, specs and constants."""
    leaves, tree = pytree.tree_flatten(value)
    return Boundary(tuple(_entry(leaf, sizes) for leaf in leaves), tree, names)


def _entry(leaf: Any, sizes: Values) -> TensorSpec | Constant:
    plain = settled(TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf, sizes)
    return plain if isinstance(plain, TensorSpec) else Constant(plain)


def _used(graph: fx.Graph, model: nn.Module) -> list[str]:
    """Paths of the parameters that a graph uses, and of the modules with parameters that it calls."""
    calls = [str(n.target) for n in graph.nodes if n.op == "call_module"]
    reads = [
        str(n.target) for n in graph.nodes if n.op == "get_attr" and getattr(n.meta.get("val"), "requires_grad", False)
    ]
    return [path for path in calls if next(model.get_submodule(path).parameters(), None) is not None] + reads


def _changes(node: fx.Node) -> bool:
    """Whether sizes of the batch are among the arguments of a node, or in what is checked of its result."""
    return ASSUMED in node.meta or has_sizes(node)


def _settled(graph: fx.Graph, values: Values) -> fx.Graph:
    """A copy with plain numbers."""
    here: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    for node in graph.nodes:
        here[node] = new = copy.node_copy(node, here.__getitem__)
        if _changes(new):
            new.args, new.kwargs = settled(tuple(new.args), values), settled(dict(new.kwargs), values)
            if ASSUMED in new.meta:
                new.meta[ASSUMED] = settled(new.meta[ASSUMED], values)
    return copy
