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
from typing import Any

import torch
from torch import Tensor

from schedc_runtime.partition.values import KNOWN
from schedc_runtime.pipeline.agree.batch import (
    BatchRefused,
    common_rows,
    microbatch_of,
    one_microbatch,
    signature_of,
    split,
)
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

    All ranks get few whole numbers on the CPU, such as grids of patches, and a model may read them on the host.
    Raises `BatchRefused` where counts and values do not fit together.
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
        counts = self.per_row
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
            raise BatchRefused("per_row of a Ragged field has what is no count", "give whole numbers of 0 or more")
        if not self.values.dim() or sum(counts) != self.values.shape[0]:
            raise BatchRefused(
                f"a Ragged field of shape {list(self.values.shape)} has counts per row that add up to {sum(counts)}",
                "give the items of all rows along the first dimension, and the number of each row's",
            )
        if self.items is not None and self.items < 1:
            raise BatchRefused(f"Ragged(items={self.items})", "give the number of items of a microbatch, 1 or more")

    @property
    def is_told(self) -> bool:
        """Whether all ranks get the values: few whole numbers that the host has."""
        values = self.values
        whole = not (values.dtype.is_floating_point or values.dtype.is_complex)
        return whole and values.device.type == "cpu" and values.numel() <= _TOLD

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
        padded = self.values.new_empty(parts, self.items, *self.values.shape[1:])
        padded[:] = torch.as_tensor(self.fill, dtype=padded.dtype, device=padded.device)
        for part, (end, count) in enumerate(zip(ends, own, strict=True)):
            padded[part, :count] = self.values[end - count : end]
        return list(padded.unbind())


class CutBatch(list[Any]):
    """[microbatches] a batch that was cut by row. dims: the dimensions of its rows, None for what was `Ragged`.

    told: the fields that were `Ragged` and of whose values the signature tells.
    """

    def __init__(self, parts: Sequence[Any], dims: Dims, told: Collection[str | int]) -> None:
        super().__init__(parts)
        self.dims, self.told = dims, told

    def signatures(self) -> list[Json]:
        """[microbatches] the signature of each, with the values of small whole numbers."""
        signatures = [signature_of(part, self.dims) for part in self]
        for part, signature in zip(self, signatures, strict=True):
            fields = signature.get("fields", signature.get("items"))
            for name in self.told:
                fields[name][KNOWN] = [False, 0, part[name].tolist()]
        return signatures


def cut_batch(batch: Any, parts: int, dims: Dims) -> Any:
    """``batch`` cut into [parts] microbatches where it has `Ragged` fields; else as it is. dims: as of `split`.

    Raises `BatchRefused` for rows that do not divide, and for fields with other numbers of rows.
    """
    if not (ragged := _ragged_in(batch)):
        return batch
    fields = batch if isinstance(batch, dict) else dict(enumerate(batch))
    plain = {name: value for name, value in fields.items() if name not in ragged}
    _check_rows(plain, ragged, parts, dims)
    cut = {name: split(value, parts, None, dims=dims, dim=dims.get(name, 0)) for name, value in plain.items()}
    cut |= {name: value.cut(parts, name) for name, value in ragged.items()}
    each = zip(*(cut[name] for name in fields), strict=True)
    parted = [dict(zip(fields, values, strict=True)) if isinstance(batch, dict) else values for values in each]
    told = [name for name, value in ragged.items() if value.is_told]
    return CutBatch(parted, {**dims, **dict.fromkeys(ragged)}, told)


def first_microbatch(example: Any, microbatches: int, dims: Dims) -> Any:
    """As `one_microbatch`, of an example that may have `Ragged` fields: the microbatch with the most items."""
    if not (ragged := _ragged_in(example)):
        return one_microbatch(example, microbatches, dims)
    parts = microbatches if all(len(value.per_row) % microbatches == 0 for value in ragged.values()) else 1
    counts = [value.counts(parts) for value in ragged.values()]
    if any(value.items and value.items < max(own) for value, own in zip(ragged.values(), counts, strict=True)):
        return first_microbatch(_changed(example, {n: replace(x, items=None) for n, x in ragged.items()}), parts, dims)
    cut = cut_batch(example, parts, dims)
    items = [sum(own) for own in zip(*counts, strict=True)]
    fullest = items.index(max(items))
    return microbatch_of(cut.signatures()[fullest], 1)


def _changed(batch: Any, fields: dict[Any, Any]) -> Any:
    """A dict or tuple with other ``fields`` of these names or positions."""
    return batch | fields if isinstance(batch, dict) else tuple(fields.get(n, value) for n, value in enumerate(batch))


def _ragged_in(batch: Any) -> dict[Any, Ragged]:
    """The `Ragged` fields of a dict, by name, or of a tuple, by position."""
    if isinstance(batch, dict):
        return {name: value for name, value in batch.items() if isinstance(value, Ragged)}
    if isinstance(batch, tuple):
        return {number: value for number, value in enumerate(batch) if isinstance(value, Ragged)}
    return {}


def _check_rows(plain: Mapping[Any, Any], ragged: Mapping[Any, Ragged], parts: int, dims: Dims) -> None:
    rows = common_rows(signature_of(plain, dims), None, 1, 1)
    numbers = {name: len(value.per_row) for name, value in ragged.items()}
    wanted = rows.rows if rows else next(iter(numbers.values()))
    if wrong := next((name for name, number in numbers.items() if number != wanted), None):
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
