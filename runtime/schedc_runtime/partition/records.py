"""The recordings of a partitioned model, one per input signature and mode, with the code of every stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from schedc_runtime.errors import PartitionError
from schedc_runtime.partition.boundary import Boundary, Constant, TensorSpec
from schedc_runtime.partition.effects import ambient
from schedc_runtime.partition.example import named_arguments
from schedc_runtime.partition.graft import graft
from schedc_runtime.partition.homes import Homes
from schedc_runtime.partition.reads import Reads
from schedc_runtime.partition.record import NodeRule, modules_outside, record
from schedc_runtime.partition.recorded_stage import CodeSlot, RecordedStage, StageCode, attribute_of, equip
from schedc_runtime.partition.recorder import Recording
from schedc_runtime.partition.split import CutRecording, Entries
from schedc_runtime.partition.stage_code import compiled
from schedc_runtime.random_numbers.counting import DrawEvent
from schedc_runtime.random_numbers.names import aliases_of

_KEPT = 32
"""Recordings kept: batches of changing length must not use ever more memory."""


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


class Records:
    """Records a model anew for every signature, and cuts it at the same places.

    wanted: names of units and split points. entered: [entries] their names in the order in which the model runs.
    cuts: [stages - 1] entries before each cut. slots: [stages] where the current code of each stage is.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: NodeRule,
        inputs: Sequence[str] | None,
        wanted: frozenset[str],
        entered: tuple[str, ...],
        cuts: Sequence[int],
    ) -> None:
        self.model, self.rule, self.inputs = model, rule, inputs
        self.aliases = aliases_of(model)
        self.wanted, self.entered, self.cuts = wanted, entered, tuple(cuts)
        self.homes = Homes(model, entered, cuts)
        self.slots = tuple(CodeSlot() for _ in range(len(cuts) + 1))
        self.first: Record | None = None
        self.current: Record | None = None
        self.recordings = 1
        """How often the model has run on fake tensors."""
        self._kept: OrderedDict[str, Record] = OrderedDict()
        self.reads = Reads(model, {name: model.get_submodule(name) for name in modules_outside(model, rule)})
        self.asked: dict[tuple[str, ...], frozenset[str]] = {}
        """By names of a call's arguments: those whose values a recording asked for."""
        self._orders: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = {}
        """By number of positional arguments and keywords of a call: the order in which the values enter stage 0."""
        self._homes: dict[str, object] = {}
        """By path: the parameters, and the modules with parameters, that stages hold."""

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool) -> Record:
        """The record of a microbatch; a `TensorSpec` may replace a tensor. training: the mode around units."""
        named = named_arguments(self.model, args, kwargs, self.inputs)
        self.reads.refresh()
        key = self._key(named, training)
        if key not in self._kept:
            self.recordings += 1
            recording = record(self.model, named, self.rule, training=training, device=device_of(self.model))
            code = self._cut(recording, named)
            key = self._note_asked(recording, named, training)
            self._kept[key] = code
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def ordered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of a call in the order in which they enter stage 0. It runs for every microbatch."""
        form = (len(args), tuple(kwargs))
        order = self._orders.get(form)
        if order is None:
            keywords = {name: position for position, name in enumerate(kwargs, len(args))}
            order = tuple(named_arguments(self.model, range(len(args)), keywords, self.inputs).values())
            self._orders[form] = order
        values = (*args, *kwargs.values())
        return tuple([values[position] for position in order])

    def select(self, record: Record) -> None:
        """Let all stages run the code of a record from now on."""
        self.current = record
        for slot, code in zip(self.slots, record.codes, strict=True):
            slot.code = code

    def stage_modules(self) -> tuple[RecordedStage, ...]:
        """[stages] new modules with the submodules, parameters and buffers that the current codes use."""
        modules = tuple(RecordedStage(slot) for slot in self.slots)
        for module in modules:
            module.training = self.model.training
            self.equip(module)
        if head := self.rule.head:  # the last stage hands it to the loss
            graft(modules[-1], head, self.model.get_submodule(head))
        return modules

    def equip(self, module: nn.Module) -> None:
        """Give a stage module, or a copy of one, what its current code reads and an earlier code did not.

        These are buffers and modules without parameters: `of` has compared the parameters.
        """
        if isinstance(module, RecordedStage):
            equip(module, self.model)

    def keep_first(self, recording: Recording, named: Mapping[str, Any]) -> Record:
        """Cut the first recording, which decides the parameters of each stage. It was made in the model's mode."""
        self.first = self._cut(recording, named)
        with torch.enable_grad():  # as it was recorded
            self._kept[self._note_asked(recording, named, self.model.training)] = self.first
        self.select(self.first)
        self.accept()
        return self.first

    @contextmanager
    def changed_by_pipeline(self) -> Iterator[None]:
        """Takes what changes in the model inside for no change: the pipeline does it."""
        self.reads.refresh()
        try:
            yield
        finally:
            self.accept()

    def accept(self) -> None:
        """Take the model as it is for the one that was recorded: the pipeline has changed it, and nobody else."""
        self.reads.accept()
        paths = [path for paths in self.first.parameters for path in paths] if self.first else []
        self._homes = {path: attribute_of(self.model, path) for path in paths}

    def values_asked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str | int] | None:
        """The arguments of a call, by position or keyword, whose values recordings ask for; None if not known yet."""
        keys = dict(zip(kwargs, kwargs, strict=True))
        places = named_arguments(self.model, range(len(args)), keys, self.inputs)
        asked = self.asked.get(tuple(places))
        return None if asked is None else frozenset(place for name, place in places.items() if name in asked)

    def _note_asked(self, recording: Recording, named: Mapping[str, Any], training: bool) -> str:
        """Note of which arguments values were asked. Returns the key of the recording."""
        names = tuple(named)
        self.asked[names] = self.asked.get(names, frozenset()) | recording.asked
        return self._key(named, training)

    def _key(self, named: Mapping[str, Any], training: bool) -> str:
        """What a recording depends on besides the model. Values count where recordings ask for them."""
        asked = self.asked.get(tuple(named), frozenset(named))
        signs = {name: pytree.tree_map(_known if name in asked else _sign, value) for name, value in named.items()}
        return f"{signs} {training} {device_of(self.model)} {ambient()} {self.reads.key(training)}"

    def _cut(self, recording: Recording, named: Mapping[str, Any]) -> Record:
        self.reads.add(recording.reads)
        graphs = CutRecording(recording, self.homes.begins(Entries.of(recording, self.wanted)))
        stages = [graphs.graph(stage) for stage in range(graphs.stages)]
        parameters = tuple(frozenset(_used(graph, self.model)) for graph in stages)
        self._check_homes(parameters, named)
        template = recording.output
        assert template is not None
        name = type(self.model).__name__
        codes = tuple(
            StageCode(
                graph,
                compiled(graph, f"stage {stage} of {name}"),
                (lambda leaves: template.fill(iter(leaves))) if stage == graphs.stages - 1 else None,
                tuple(_shape(node) for node in graph.nodes if node.op == "placeholder"),
            )
            for stage, graph in enumerate(stages)
        )
        values = tuple(tuple(node.name for node in nodes) for nodes in graphs.crossing)
        return Record(
            self._boundaries(recording, graphs, named),
            recording.inputs,
            values,
            codes,
            parameters,
            tuple(dict.fromkeys(recording.assumed)),
            graphs.draws(),
        )

    def _boundaries(self, recording: Recording, graphs: CutRecording, named: Mapping[str, Any]) -> tuple[Boundary, ...]:
        between = [
            boundary_of(tuple(n.meta["val"] for n in nodes), tuple(n.name for n in nodes)) for nodes in graphs.crossing
        ]
        (leaves,) = next(node for node in recording.graph.nodes if node.op == "output").args
        values = [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        assert recording.output is not None
        return (
            boundary_of(tuple(named.values()), recording.inputs),
            *between,
            boundary_of(recording.output.fill(iter(values)), ("output",)),
        )

    def _check_homes(self, parameters: Sequence[frozenset[str]], named: Mapping[str, Any]) -> None:
        """Refuse a recording in which a stage uses parameters that it does not hold."""
        if self.first is None:
            return
        for path, held in self._homes.items():
            if attribute_of(self.model, path) is not held:
                raise PartitionError(
                    f"`{path}` of {type(self.model).__name__} was replaced: stages and optimizer hold what was there",
                    "write into the parameters that are there, or make a new Pipeline and a new optimizer",
                )
        for stage, (before, now) in enumerate(zip(self.first.parameters, parameters, strict=True)):
            if new := sorted(path for path in now - before if self.homes.lacks(stage, path)):
                raise PartitionError(
                    f"on inputs of the shapes {_shapes(named)} stage {stage} uses `{new[0]}`"
                    f"{f' and {len(new) - 1} more' if len(new) > 1 else ''}, which it does not hold. A stage holds what"
                    " it uses in the example, and what is registered beside that",
                    "give an example that uses it (Pipeline(..., example=batch)), or register it beside the units that"
                    " run with it. For a model that has other units now, make a new Pipeline",
                )


def boundary_of(values: Any, names: tuple[str, ...]) -> Boundary:
    """The boundary of values: nested containers of tensors, specs and constants."""
    leaves, tree = pytree.tree_flatten(values)
    entries = tuple(
        TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, TensorSpec) else Constant(leaf)
        for leaf in leaves
    )
    return Boundary(entries, tree, names)


def device_of(model: nn.Module) -> torch.device:
    """The device of the parameters that are not on the meta device; the CPU if all are."""
    real = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(real, torch.device("cpu"))


def _used(graph: fx.Graph, model: nn.Module) -> list[str]:
    """Paths of the parameters that a graph uses, and of the modules with parameters that it calls."""
    calls = [str(n.target) for n in graph.nodes if n.op == "call_module"]
    reads = [
        str(n.target) for n in graph.nodes if n.op == "get_attr" and getattr(n.meta.get("val"), "requires_grad", False)
    ]
    return [path for path in calls if next(model.get_submodule(path).parameters(), None) is not None] + reads


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _sign(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, (Tensor, TensorSpec)) else leaf


def _known(leaf: Any) -> Any:
    return _sign(leaf), getattr(leaf, "known", None)


def _shapes(named: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {list(value.shape) if isinstance(value, (Tensor, TensorSpec)) else value}"
        for name, value in named.items()
    )
