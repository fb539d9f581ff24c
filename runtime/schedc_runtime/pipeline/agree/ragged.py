"""Fields of a batch with several items per row, such as images: they are cut by row, never along their items.

input_ids     [rows, T]
pixel_values  [items, 3, H, W]   Ragged(pixel_values, per_row=[2, 0, 1, 3]): row 0 has the first two items, row 1 none

A batch with such a field is a list of microbatches, which have as many items as their rows: nothing is padded unless
the field says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import index
from typing import Any

from torch import Tensor

from schedc_runtime.partition.boundary import KnownValues
from schedc_runtime.partition.records import Records
from schedc_runtime.partition.values import KNOWN
from schedc_runtime.pipeline.agree.batch import (
    BatchRefused,
    common_rows,
    microbatch_of,
    one_microbatch,
    signature_of,
    split,
)
from schedc_runtime.pipeline.agree.contents import arguments_asked, batch_facts, with_facts
from schedc_runtime.pipeline.agree.rows import Dims

Json = Any
_TOLD = 4096
"""Most numbers of a field whose values all ranks get in a step."""


@dataclass(frozen=True)
class Ragged:
    """A field with several items per row.

    values: [items, ...] the items of row 0, then those of row 1, and so on.
    per_row: [rows] the number of items of each row, as numbers or on the CPU: a step knows all shapes in advance.
    items: pad each microbatch behind to this many items. Replicas with different numbers need it. None for no padding.
    fill: [...] or one number: a padded item, such as the grid of a padded image.

    A model may read up to 4,096 whole numbers on the CPU on the host, such as grids of patches: all ranks get them.
    Raises `BatchRefused` where counts, values and fill do not fit together.
    """

    values: Tensor
    per_row: Sequence[int] | Tensor
    items: int | None = None
    fill: float | Tensor = 0

    def __post_init__(self) -> None:
        if isinstance(self.per_row, Tensor):
            if self.per_row.device.type != "cpu":
                raise BatchRefused(
                    "the counts of a Ragged field are on a device: a step would wait for them",
                    "keep per_row on the CPU, or give numbers",
                )
            object.__setattr__(self, "per_row", self.per_row.tolist())
        try:
            counts = [index(count) for count in self.per_row if not isinstance(count, bool)]
        except TypeError:
            counts = []
        if len(counts) != len(self.per_row) or min(counts, default=0) < 0:
            raise BatchRefused("per_row of a Ragged field has what is no count", "give whole numbers of 0 or more")
        object.__setattr__(self, "per_row", counts)
        if not self.values.dim() or sum(counts) != self.values.shape[0]:
            raise BatchRefused(
                f"a Ragged field of shape {list(self.values.shape)} has counts per row that add up to {sum(counts)}",
                "give the items of all rows along the first dimension, and the number of each row's",
            )
        items = self.items
        if items is not None and (isinstance(items, bool) or not isinstance(items, int) or items < 1):
            raise BatchRefused(f"Ragged(items={items})", "give the number of items of a microbatch, 1 or more")
        self._check_fill()

    def _check_fill(self) -> None:
        fill, values = self.fill, self.values
        if isinstance(fill, Tensor) and fill.dim() and fill.shape != values.shape[1:]:
            raise BatchRefused(
                f"fill has the shape {list(fill.shape)}, and an item of the Ragged field {list(values.shape[1:])}",
                "give the values of an item, or a number",
            )
        whole = _is_whole(fill) if isinstance(fill, Tensor) else fill % 1 == 0
        if _is_whole(values) and not whole:
            raise BatchRefused(
                f"fill is not whole, and the Ragged field has {str(values.dtype).removeprefix('torch.')}",
                "give a whole number, or whole numbers",
            )

    @property
    def is_told(self) -> bool:
        """Whether all ranks get the values where a model reads them: few whole numbers that the host has."""
        return _is_whole(self.values) and self.values.device.type == "cpu" and self.values.numel() <= _TOLD

    def counts(self, parts: int) -> list[int]:
        """[parts] the number of items of each microbatch."""
        rows = len(self.per_row) // parts
        return [sum(self.per_row[part * rows : (part + 1) * rows]) for part in range(parts)]

    def cut(self, parts: int, name: str | int) -> list[Tensor]:
        """[parts] the items [own items, ...] of each microbatch, padded if `items` says so. name: for errors."""
        own = self.counts(parts)
        ends = list(accumulate(own))
        if self.items is None:
            return [self.values[end - count : end] for end, count in zip(ends, own, strict=True)]
        if (most := max(own)) > self.items:
            raise BatchRefused(
                f"microbatch {own.index(most)} has {most} items of `{name}`, and Ragged(items={self.items}) has room"
                f" for {self.items}",
                "raise items, or put rows with many items into different microbatches",
            )
        fill, shape = self.fill, (parts, self.items, *self.values.shape[1:])
        if isinstance(fill, Tensor):
            padded = self.values.new_empty(shape)
            padded[:] = fill.to(padded.device, non_blocking=True)
        else:
            padded = self.values.new_full(shape, fill)
        for part, (end, count) in enumerate(zip(ends, own, strict=True)):
            padded[part, :count] = self.values[end - count : end]
        return list(padded.unbind())


class CutBatch(list[Any]):
    """[microbatches] a batch that was cut by row. dims: the dimensions of its rows, None for what was `Ragged`.

    told: the fields that were `Ragged` and of whose values the signature tells where recordings ask for them.
    """

    def __init__(self, parts: Sequence[Any], dims: Dims, told: Collection[str | int]) -> None:
        super().__init__(parts)
        self.dims, self.told = dims, told

    def signatures(self, records: Records | None = None) -> list[Json]:
        """[microbatches] the signature of each, with the values of few whole numbers.

        records: fields for which no recording asks are left out, and make no shapes of their own.
        """
        asked = arguments_asked(self[0], records)
        told = [name for name in self.told if asked is None or name in asked]
        signatures = [signature_of(part, self.dims) for part in self]
        for part, signature in zip(self, signatures, strict=True):
            fields = signature.get("fields", signature.get("items"))
            for name in told:
                fields[name][KNOWN] = list(KnownValues(False, 0, part[name].tolist()))
        return signatures


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def cut_batch(batch: Any, parts: int, dims: Dims) -> Any:
    """``batch`` cut into [parts] microbatches where it has `Ragged` fields; else as it is. dims: as of `split`.

    Raises `BatchRefused` for rows that do not divide, and for fields with other numbers of rows.
    """
    if not (ragged := _ragged_in(batch)):
        return batch
    return _cut(batch, ragged, parts, dims)


def first_microbatch(example: Any, microbatches: int, dims: Dims) -> Any:
    """As `one_microbatch`, of an example that may have `Ragged` fields: the microbatch with the most items."""
    if not (ragged := _ragged_in(example)):
        return one_microbatch(example, microbatches, dims)
    parts = microbatches if all(len(value.per_row) % microbatches == 0 for value in ragged.values()) else 1
    counts = [value.counts(parts) for value in ragged.values()]
    if any(value.items and value.items < max(own) for value, own in zip(ragged.values(), counts, strict=True)):
        ragged = {name: replace(value, items=None) for name, value in ragged.items()}
    cut = _cut(example, ragged, parts, dims)
    items = [sum(own) for own in zip(*counts, strict=True)]
    fullest = items.index(max(items))
    signature = cut.signatures()[fullest]
    return microbatch_of(with_facts(signature, batch_facts(cut[fullest], signature)), 1)


def _cut(batch: Any, ragged: Mapping[Any, Ragged], parts: int, dims: Dims) -> CutBatch:
    """A batch in [parts] microbatches. ragged: its fields with several items per row."""
    by_name = isinstance(batch, Mapping)
    fields = batch if by_name else dict(enumerate(batch))
    plain = {name: value for name, value in fields.items() if name not in ragged}
    _check_rows(plain, ragged, parts, dims)
    items = {name: value.cut(parts, name) for name, value in ragged.items()}
    parted: list[Any] = []
    for part, rows in enumerate(split(plain, parts, None, dims=dims)):
        own = {name: items[name][part] if name in items else rows[name] for name in fields}
        parted.append(own if by_name else tuple(own.values()))
    told = [name for name, value in ragged.items() if value.is_told]
    return CutBatch(parted, {**dims, **dict.fromkeys(ragged)}, told)


def _ragged_in(batch: Any) -> dict[Any, Ragged]:
    """The `Ragged` fields of a mapping, by name, or of a tuple, by position."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if isinstance(value, Ragged)}
    if isinstance(batch, tuple):
        return {number: value for number, value in enumerate(batch) if isinstance(value, Ragged)}
    return {}


def _check_rows(plain: Mapping[Any, Any], ragged: Mapping[Any, Ragged], parts: int, dims: Dims) -> None:
    rows = common_rows(signature_of(plain, dims), None, 1, 1)
    numbers = {name: len(value.per_row) for name, value in ragged.items()}
    wanted = rows.rows if rows else next(iter(numbers.values()))
    wrong = next((name for name, number in numbers.items() if number != wanted), None)
    if wrong is not None:
        raise BatchRefused(
            f"`{wrong}` says how many items {numbers[wrong]} rows have, and the batch has {wanted} rows",
            "give a number for each row, 0 for none",
        )
    if wanted % parts:
        raise BatchRefused(
            f"a batch of {wanted} rows with `{next(iter(ragged))}` does not divide into {parts} microbatches, and items"
            " are not repeated",
            f"use a batch size that is a multiple of {parts}, or drop the last, smaller batch of an epoch",
        )
