"""Bound code of this process: executors per program, and what each input signature changes in them.

Stages that run microbatches in slices have the code of a slice; boundaries are those of a microbatch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from schedc.ir.program import Program
from schedc_runtime.data_parallel.hot_returns import with_hot_returns
from schedc_runtime.data_parallel.stage_replicas import Sharding, StageReplicas, check_summed, stage_replicas
from schedc_runtime.device.choice import device_for
from schedc_runtime.execute.bind import bind
from schedc_runtime.execute.code import Code
from schedc_runtime.execute.executor import Executor
from schedc_runtime.execute.micro_steps import CellSource
from schedc_runtime.execute.operands import ReplicaKey, message_forms
from schedc_runtime.execute.places import with_places
from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.partition import Partition
from schedc_runtime.partition.boundary import Boundary, SlicedBoundary, TensorSpec, check_outputs
from schedc_runtime.partition.cut_record import Record
from schedc_runtime.partition.effects import ambient
from schedc_runtime.partition.example import arguments
from schedc_runtime.partition.shared import SharedParameter, copies_in
from schedc_runtime.pipeline.agree.batch import BatchRefused, microbatch_of
from schedc_runtime.pipeline.agree.shapes import shapes_in
from schedc_runtime.pipeline.agree.signatures import in_words
from schedc_runtime.pipeline.build.random_steps import DrawPlan, draw_plan
from schedc_runtime.pipeline.build.stages import StagesByIndex
from schedc_runtime.ranks.mesh import Coordinate, Mesh, PeerGroups
from schedc_runtime.stage.bound_shape import BoundShape
from schedc_runtime.stage.stage import Stage
from schedc_runtime.transport.base import MessageForm, Transport

_KEPT = 16
"""Bound streams kept."""
_SIGNATURES = 256
"""Signatures kept: batches of changing length must not use ever more memory."""


class BoundSignature(NamedTuple):
    """What is kept for one signature and program. draws: None if random numbers are not by name.

    executors: one per place here, which signatures with the same tensors of other shapes share. forms: the contents of
    messages, as of `message_forms`. shapes: by id, the stages here as they are bound to it, where it is one of several
    in a step.
    """

    record: Record
    draws: DrawPlan | None
    executors: dict[Coordinate, Executor]
    forms: tuple[MessageForm, ...]
    shapes: Mapping[int, BoundShape] = MappingProxyType({})


class BoundCode:
    """What has been bound so far.

    stages: stages of each place in this process. Binding or looking up a signature sets their boundaries.
    cells: the order inside cells. shards: shards of the dense parts, where these are sharded. tied: the parameters that
    stages of other ranks use, too. slices: [stages] number of slices of a microbatch; empty without slices.
    marked: whether streams tell how far the device has come (`DevicePlaces`).
    """

    def __init__(
        self,
        partition: Partition,
        stages: Mapping[Coordinate, StagesByIndex],
        mesh: Mesh,
        device: torch.device,
        cells: CellSource,
        shards: Sharding[Any] | None = None,
        tied: Sequence[SharedParameter] = (),
        slices: Sequence[int] = (),
        marked: bool = False,
    ) -> None:
        self.marked = marked
        self.partition, self.stages, self.device, self.cells = partition, stages, device, cells
        self.mesh, self.shards, self.tied, self.slices = mesh, shards, tied, slices
        self.boundaries: Sequence[tuple[Boundary, ...]] = ()
        """[M][stages + 1] what crosses before each stage and after the last, by microbatch of the last signature."""
        self.signature: Any = None
        """The last signature."""
        self._record: Record | None = None
        self._state: tuple[Any, ...] | None = None
        """What the last call was bound by beside its signature; None behind one of several shapes."""
        self._last: BoundSignature
        """What the last call of one shape was bound to."""
        self._bound: OrderedDict[str, BoundSignature] = OrderedDict()
        self._streams: OrderedDict[Hashable, dict[Coordinate, Executor]] = OrderedDict()

    def executors(
        self,
        program: Program,
        call: str,
        signature: Any,
        transports: Mapping[Coordinate, Transport],
        peer_groups: Mapping[Coordinate, PeerGroups],
    ) -> dict[Coordinate, Executor]:
        """The executors of ``program`` for a batch of this signature, one per place here.

        call: tells programs apart, ``step`` or ``evaluate``. signature: as of an `Agreement`.
        """
        # Each part of this state may change the bound code. A frozen stage, for example, has no sums.
        training = any(stage.module.training for stage in self._held())
        read = self.partition.records.reads.key(training)
        state = program, call, training, ambient(), self._trained(), read
        if signature is self.signature and state == self._state:  # as in the last call
            return self._take(self._last, program.microbatches)
        way = " ".join(map(str, state[1:]))
        shapes, table = shapes_in(signature, program.microbatches)
        several = len(shapes) > 1
        bound = []
        for shape, parts in shapes:
            key = f"{shape} {parts} {several} {way}"
            if key not in self._bound:
                made = self._record_of(microbatch_of(shape, parts), training)
                self._bound[key] = self._bound_to(program, way, *made, several, transports, peer_groups)
                _shorten(self._bound, _SIGNATURES)
            self._bound.move_to_end(key)
            bound.append(self._bound[key])
        self.signature, self._state = signature, None if several else state
        if several:
            self._take_several(bound, shapes, table)
        else:
            self._last = bound[0]
            self._take(self._last, program.microbatches)
        return bound[0].executors

    def _record_of(self, microbatch: Any, training: bool) -> tuple[Record, DrawPlan | None]:
        """The record of a microbatch, which stages run from now on, and what they draw."""
        args, kwargs = arguments(microbatch)
        record = record_in_slices(self.partition, args, kwargs, self.slices, training=training)
        self._select(record)
        return record, draw_plan(record, list(self._held()))

    def _bound_to(
        self,
        program: Program,
        way: str,
        record: Record,
        draws: DrawPlan | None,
        several: bool,
        transports: Mapping[Coordinate, Transport],
        peer_groups: Mapping[Coordinate, PeerGroups],
    ) -> BoundSignature:
        """What is kept for a record. several: whether microbatches of other shapes run in the same step."""
        form = way, several, tuple([tuple([spec.form for spec in x.tensors]) for x in record.boundaries])
        if form not in self._streams:
            self._streams[form] = self._bind(program, record.boundaries, several, transports, peer_groups)
            _shorten(self._streams, _KEPT)
        self._streams.move_to_end(form)
        bound = BoundSignature(record, draws, self._streams[form], message_forms(record.boundaries))
        if not several:
            return bound
        self._bind_stages(bound)
        return bound._replace(shapes={id(stage): BoundShape.of(stage) for stage in self._held()})

    def _bind_stages(self, bound: BoundSignature) -> None:
        """Bind the stages here to a record, whose code is selected."""
        for stage in self._held():
            bind_stage(stage, bound.record)
            if bound.draws is not None:
                bound.draws.set(stage)

    def _take(self, bound: BoundSignature, microbatches: int) -> dict[Coordinate, Executor]:
        """Let all microbatches of the next call have one shape."""
        for executor in bound.executors.values():
            executor.registers.forms = bound.forms
        if bound.record is not self._record:
            self._select(bound.record)
            self._bind_stages(bound)
            self._record = bound.record
        self.boundaries = [bound.record.boundaries] * microbatches
        return bound.executors

    def _take_several(self, bound: Sequence[BoundSignature], shapes: Sequence[Any], table: Sequence[int]) -> None:
        """Let each microbatch of the next call have its own shape. shapes, table: as of `shapes_in`.

        Raises `BatchRefused` where other values cross between stages for one of them.
        """
        for each, (signature, _) in zip(bound, shapes, strict=True):
            if each.executors is not bound[0].executors:
                raise BatchRefused(
                    f"other values cross between stages for {in_words(signature)} than for {in_words(shapes[0][0])}",
                    "run microbatches of such shapes in steps of their own",
                )
        forms = tuple(chain.from_iterable([bound[shape].forms for shape in table]))
        for executor in bound[0].executors.values():
            executor.registers.forms = forms
        for stage in self._held():
            stage.shapes = [bound[shape].shapes[id(stage)] for shape in table]
        self._record, self.boundaries = None, [bound[shape].record.boundaries for shape in table]

    def _held(self) -> Iterator[Stage]:
        return (stage for held in self.stages.values() for stage in held.values())

    def fit(self, stage: Stage) -> None:
        """Let a further stage of the model run the code of the last signature."""
        assert self._record is not None
        self.partition.records.equip(stage.module)
        bind_stage(stage, self._record)
        if (draws := draw_plan(self._record, [stage])) is not None:
            draws.set(stage)

    def _trained(self) -> str:
        """Which stages here have something to train."""
        return "".join(["1" if stage.tree.trains() else "0" for stage in self._held()])

    def _select(self, record: Record) -> None:
        """Let the stages run the code of a record."""
        self.partition.records.select(record)
        for stage in self._held():
            self.partition.records.equip(stage.module)

    def forget(self) -> None:
        """Drop all executors, with whatever they hold: after a failure their messages no longer match."""
        for bound in self._bound.values():
            for executor in bound.executors.values():
                executor.reset()
        self._state = None
        self._bound.clear()
        self._streams.clear()
        if self.shards is not None:
            self.shards.reset()

    def take_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the dense shards, if there are any, for the caller to leave."""
        return [] if self.shards is None else self.shards.take_groups()

    def _bind(
        self,
        program: Program,
        boundaries: Sequence[Boundary],
        several: bool,
        transports: Mapping[Coordinate, Transport],
        peer_groups: Mapping[Coordinate, PeerGroups],
    ) -> dict[Coordinate, Executor]:
        replicas = {place: self._replicas(program, place, peer_groups[place]) for place in self.stages}
        codes = {
            place: with_hot_returns(
                bind(program, place.pipeline, held, boundaries, cells=self.cells, tied=self.tied,
                     replicas=replicas[place], by_microbatch=several),
                held,
                summed=peer_groups[place].same_experts.size > 1,
            )
            for place, held in self.stages.items()
        }  # fmt: skip
        return {place: self._executor(program, place, code, transports[place]) for place, code in codes.items()}

    def _executor(self, program: Program, place: Coordinate, code: Code, transport: Transport) -> Executor:
        places, name = None, self.mesh.name(place)
        if self.marked:
            code, places = with_places(code, device_for(self.device))
        executor = Executor(program, code, transport, self.device, name)
        executor.places = places
        return executor

    def _replicas(
        self, program: Program, place: Coordinate, peer_groups: PeerGroups
    ) -> dict[ReplicaKey, StageReplicas]:
        """What the works among replicas of a place run on."""
        held = self.stages[place]
        tied = copies_in({index: stage.module for index, stage in held.items()}, self.tied)
        shards = {index: self.shards.of(stage.module) for index, stage in held.items()} if self.shards else {}
        stream = list(program.instructions(place.pipeline))
        replicas = stage_replicas(stream, held, peer_groups, tied, shards)
        check_summed(replicas, stream, program.works)
        return replicas


def _shorten(kept: OrderedDict[Any, Any], most: int) -> None:
    """Drop what was used least lately, beyond so many."""
    while len(kept) > most:
        kept.popitem(last=False)


def record_in_slices(
    partition: Partition, args: Sequence[Any], kwargs: Mapping[str, Any], slices: Sequence[int], *, training: bool
) -> Record:
    """The record of one microbatch. Stages in slices have the code of a slice; boundaries are those of a microbatch.

    slices: [stages] number of slices; empty where no stage has more than one. Raises `PartitionError` where a boundary
    of such a stage cannot be split.
    """
    by_count = {count: _of_slice(partition, args, kwargs, count, training) for count in sorted({*slices} - {1})}
    whole = partition.record(args, kwargs, training=training)
    if not by_count:
        return whole
    own = [by_count.get(count, whole) for count in slices]
    for stage, count in enumerate(slices):
        if count > 1:
            part = by_count[count].boundaries
            SlicedBoundary.of(whole.boundaries[stage], part[stage], count)
            check_outputs(SlicedBoundary.of(whole.boundaries[stage + 1], part[stage + 1], count))
    return replace(
        whole,
        codes=tuple(record.codes[stage] for stage, record in enumerate(own)),
        draws=tuple(record.draws[stage] for stage, record in enumerate(own)),
        slices={count: record.boundaries for count, record in by_count.items()},
    )


def bind_stage(stage: Stage, record: Record) -> None:
    """Set the boundaries of a stage, which runs the code of the record."""
    index = stage.index
    sides = record.boundaries[index], record.boundaries[index + 1]
    if stage.slices > 1:
        part = record.slices[stage.slices]
        stage.bind(*sides, (part[index], part[index + 1]))
    else:
        stage.bind(*sides)


def _of_slice(
    partition: Partition, args: Sequence[Any], kwargs: Mapping[str, Any], count: int, training: bool
) -> Record:
    """The record of a slice. Layers note the tokens of the microbatch, as in a record of all rows."""

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, (Tensor, TensorSpec)) or not leaf.shape:
            return leaf
        dim = getattr(leaf, "rows", 0)
        if dim is None:
            return leaf
        shape = (*leaf.shape[:dim], leaf.shape[dim] // count, *leaf.shape[dim + 1 :])
        return TensorSpec(shape, leaf.dtype, known=getattr(leaf, "known", None))

    part = pytree.tree_map(rows, (tuple(args), dict(kwargs)), is_leaf=lambda leaf: isinstance(leaf, TensorSpec))
    layers = [layer for _, layer in moe_layers(partition.records.model)]
    before = [layer.outlined for layer in layers]
    for layer in layers:
        layer.outlined = 0
    record = partition.record(*part, training=training, slices=count)
    for layer, noted in zip(layers, before, strict=True):
        layer.outlined = layer.outlined * count or noted
    return record
