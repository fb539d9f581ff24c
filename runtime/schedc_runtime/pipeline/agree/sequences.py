"""Cuts the sequences of a batch into segments, which the order of a program treats as microbatches.

    [M * b rows, S tokens]  ->  [M * k * b rows, S / k tokens]     segment j of microbatch m is microbatch m * k + j

Everything behind the door of a step takes segments for rows: shapes, messages, agreements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedc_runtime.errors import RuntimeFault
from schedc_runtime.pipeline.agree.batch import BatchRefused
from schedc_runtime.pipeline.agree.rows import ROWS_FIRST, Dim, Dims, dim_of, dim_of_batch, inside

POSITIONS, _MASK = "position_ids", "attention_mask"


def segmented_call(
    batch: Any, targets: Any, microbatches: int, segments: int, dims: Dims = ROWS_FIRST
) -> tuple[Any, Any]:
    """Batch and targets of a call in segments. None stays None. microbatches: of segments, of all replicas here.

    dims: dimensions of rows by argument, as of `split`. Raises `BatchRefused` for what cannot be cut.
    """
    if microbatches % segments:
        raise BatchRefused(
            f"{microbatches} microbatches are no whole number of sequences of {segments} segments",
            f"take a multiple of {segments}",
        )
    whole = microbatches // segments
    return cut_sequences(batch, whole, segments, dims), cut_sequences(targets, whole, segments, dims, "targets")


def cut_sequences(value: Any, microbatches: int, segments: int, dims: Dims = ROWS_FIRST, what: str = "batch") -> Any:
    """``value`` with its sequences in segments; None stays None. microbatches: whose rows stay together.

    what: ``"targets"`` for what needs no positions. Raises `BatchRefused`.
    """
    if value is None:
        return None
    if isinstance(value, list):
        raise BatchRefused(
            f"the {what} is a list of microbatches, and the schedule cuts sequences into {segments} segments",
            "pass it whole: segments of a step have one shape",
        )
    if what == "batch" and (not isinstance(value, Mapping) or value.get(POSITIONS) is None or _MASK in value):
        raise BatchRefused(
            f"the schedule cuts sequences into {segments} segments, and the batch has no `{POSITIONS}`, or has an"
            f" `{_MASK}`",
            "give a dict with position_ids [rows, tokens] and no mask, as schedc_runtime.data.transformers_inputs does",
        )
    tokens = {x.shape[dim + 1] for x, dim in _rows_of(value, dims) if x.dim() > dim + 1}
    if len(tokens) > 1 or any(x.dim() <= dim + 1 for x, dim in _rows_of(value, dims)):
        raise BatchRefused(
            f"the {what} has tensors with other numbers of tokens, {sorted(tokens)}, or without tokens, and the"
            f" schedule cuts sequences into {segments} segments",
            "give tensors [rows, tokens], or take a schedule without segments",
        )
    _check(next(iter(tokens), segments), next((x.shape[dim] for x, dim in _rows_of(value, dims)), microbatches),
           microbatches, segments)  # fmt: skip
    return _mapped(value, microbatches, segments, dims, dim_of_batch(value, dims))


def _check(tokens: int, rows: int, microbatches: int, segments: int) -> None:
    if tokens % segments:
        raise BatchRefused(
            f"a sequence has {tokens} tokens, which do not divide into {segments} segments",
            f"fill sequences up to {-(-tokens // segments) * segments} tokens, with targets of -100",
        )
    if rows % microbatches:
        raise BatchRefused(
            f"the batch has {rows} rows, which do not divide into {microbatches} microbatches of whole sequences",
            f"use a batch size that is a multiple of {microbatches}",
        )


def _rows_of(value: Any, dims: Dims) -> Iterator[tuple[Tensor, int]]:
    """The tensors [rows, ...] that are cut, each with the dimension of its rows."""

    def walk(value: Any, dims: Dims, dim: Dim) -> Iterator[tuple[Tensor, int]]:
        if isinstance(value, Tensor):
            if value.dim() and (along := dim_of(value, dim)) is not None:
                yield value, along
        elif isinstance(value, (tuple, Mapping)):
            for item in inside(value, dims, dim):
                yield from walk(*item)

    return walk(value, dims, dim_of_batch(value, dims))


def _mapped(value: Any, microbatches: int, segments: int, dims: Dims, dim: Dim) -> Any:
    if isinstance(value, Tensor):
        along = dim_of(value, dim) if value.dim() else None
        if along is None:
            return value
        parted = (microbatches, value.shape[along] // microbatches, segments, value.shape[along + 1] // segments)
        cut = value.reshape(*value.shape[:along], *parted, *value.shape[along + 2 :])
        return cut.movedim(along + 2, along + 1).flatten(along, along + 2)
    if isinstance(value, (tuple, Mapping)):
        items = [_mapped(item, microbatches, segments, within, own) for item, within, own in inside(value, dims, dim)]
        return dict(zip(value, items, strict=True)) if isinstance(value, Mapping) else tuple(items)
    return value


def whole_sequences(outputs: Any, microbatches: int, segments: int, tokens: int) -> Any:
    """Outputs [segments of rows, own tokens, ...] of a step put together: [rows, tokens, ...].

    microbatches: number of them, each of whole sequences. tokens: own ones of a segment. A tensor of one dimension
    stays as it is. Raises `RuntimeFault` for another without tokens.
    """

    def joined(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        if value.shape[1] != tokens:
            raise RuntimeFault(
                f"the model has an output {list(value.shape)} of segments of {tokens} tokens, each of which has a part"
                " of a sequence",
                "return outputs [rows, tokens, ...], or take a schedule without segments",
            )
        parted = value.reshape(microbatches, segments, -1, *value.shape[1:])
        return torch.cat(parted.unbind(1), 2).flatten(0, 1)

    return pytree.tree_map(joined, outputs)
