"""Times of slices over those of whole microbatches: the row ``slices`` of a table of cells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from schedc.cell.costs import CellCosts, SegmentTimes, SliceFactor


def rows_of_slices(batch: Any) -> int:
    """The rows of a microbatch: dimension 0 of its first tensor; 0 without tensors that have one."""
    leaves = pytree.tree_leaves(batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


def first_slice(value: Any, rows: int, slices: int) -> Any:
    """The value with the first of so many slices of each tensor [rows, ...]."""
    return pytree.tree_map(
        lambda leaf: (
            leaf[: rows // slices] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows else leaf
        ),
        value,
    )


def slice_factor(slices: int, whole: CellCosts, part: CellCosts) -> SliceFactor:
    """By how much all slices together take longer. whole, part: times of a microbatch, and of one slice of it.

    Factors are those of the sums over all segments, and over all exchanges; 1 where a microbatch takes no time.
    """

    def factor(whole: Iterable[tuple[str, SegmentTimes]], part: Iterable[tuple[str, SegmentTimes]]) -> float:
        before, after = (sum(sum(times) for _, times in table) for table in (whole, part))
        return float(f"{slices * after / before:.4g}") if before > 0 and after > 0 else 1.0

    return SliceFactor(slices, factor(whole.segments, part.segments), factor(whole.exchanges, part.exchanges))
