"""Stages that run microbatches in slices: the code of slices for a batch's signature, and what such batches must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from schedc_runtime.moe.layer import moe_layers
from schedc_runtime.partition import Partition
from schedc_runtime.partition.boundary import TensorSpec
from schedc_runtime.partition.cut_record import Record
from schedc_runtime.partition.sliced_boundary import SlicedBoundary, check_outputs
from schedc_runtime.stage.stage import Stage


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
