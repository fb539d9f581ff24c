"""Copies rows and sums the copies in one fixed order: the two adjoint moves that make up every dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schedc.ir.arrays import Int64


@dataclass(frozen=True)
class SumLevel:
    """The copies of ``small`` rows.

    of: [copies] the row that each copy is of. at: [copies] index of each copy on the larger side; None: in order.
    bounds: [chunks + 1] where the chunks of copies begin and end. No row occurs twice in a chunk, so that a chunk is
    added at once with the same bits on every device. Chunks are added in their order.
    """

    of: Tensor
    at: Tensor | None
    bounds: tuple[int, ...]
    small: int

    def total(self, copies: Tensor) -> Tensor:
        """[larger side, ...] to [small, ...]: sums the copies of each row from zero, chunk after chunk."""
        result = copies.new_zeros(self.small, *copies.shape[1:])
        for start, end in pairwise(self.bounds):
            chunk = copies[start:end] if self.at is None else copies.index_select(0, self.at[start:end])
            result.index_add_(0, self.of[start:end], chunk)
        return result


@dataclass(frozen=True)
class Tree:
    """Copies of rows in levels, from the trunk to the leaves. Sums run through the same levels, backwards.

    direct: [leaves] the row of the trunk that each leaf copies. blank: [paddings] leaves that are padding, zero.
    """

    levels: tuple[SumLevel, ...]
    direct: Tensor
    blank: Tensor | None = None

    def spread(self, rows: Tensor) -> Tensor:
        """[trunk, ...] to [leaves, ...]: copies. Its gradient is `total`."""
        result: Tensor = _Spread.apply(rows, self)  # type: ignore[no-untyped-call]
        return result

    def total(self, leaves: Tensor) -> Tensor:
        """[leaves, ...] to [trunk, ...]: sums of copies. Its gradient is `spread`."""
        result: Tensor = _Total.apply(leaves, self)  # type: ignore[no-untyped-call]
        return result


@dataclass(frozen=True)
class Places:
    """Indices of entries that lie in blocks, each block as long as its entries or padded to one capacity.

    at: [entries] index of each entry. sizes: [blocks] rows of each block, padding included. full: no padding, so that
    ``at`` counts up from 0.
    """

    at: Int64
    sizes: Int64
    full: bool

    @property
    def total(self) -> int:
        return int(self.sizes.sum())


def places(blocks: Int64, count: int, capacity: int | None) -> Places:
    """The places of entries sorted by block.

    blocks: [entries] block of each entry. count: number of blocks. capacity: rows of a padded block; None: no padding.

    Raises ValueError if a block has more entries than its capacity.
    """
    sizes = np.bincount(blocks, minlength=count)
    if capacity is None:
        return Places(np.arange(len(blocks)), sizes, True)
    if sizes.size and int(sizes.max()) > capacity:
        raise ValueError(f"block {int(sizes.argmax())} has {int(sizes.max())} entries, its capacity is {capacity}")
    first = np.cumsum(sizes) - sizes
    indices = blocks * capacity + np.arange(len(blocks)) - first[blocks]
    return Places(indices, np.full(count, capacity), len(blocks) == count * capacity)


def bounds(chunks: Int64, count: int) -> tuple[int, ...]:
    """[chunks + 1] where the chunks of entries sorted by chunk begin and end, without empty chunks."""
    return tuple(np.unique(np.searchsorted(chunks, np.arange(count + 1))).tolist()) if len(chunks) else ()


def tree(levels: Sequence[tuple[Int64, Int64 | None, tuple[int, ...], int]], direct: Int64, layout: Places) -> Tree:
    """A tree from the columns of its `SumLevel`s: of [copies], at [copies] or None, bounds and small.

    direct: [leaves without padding] the row of the trunk that each leaf copies. layout: the leaves' places.
    """
    all_levels = [
        SumLevel(torch.from_numpy(of), None if at is None or _counts_up(at) else torch.from_numpy(at), cuts, small)
        for of, at, cuts, small in levels
    ]
    # A level of one copy per row, in order, adds nothing. The last one stays, so that every sum begins from zero.
    kept = tuple(x for x in all_levels[:-1] if x.at is not None or len(x.of) != x.small or not _counts_up(x.of.numpy()))
    if layout.full:
        return Tree((*kept, all_levels[-1]), torch.from_numpy(direct))
    whole = np.zeros(layout.total, dtype=np.int64)
    whole[layout.at] = direct
    return Tree(
        (*kept, all_levels[-1]),
        torch.from_numpy(whole),
        torch.from_numpy(np.setdiff1d(np.arange(layout.total), layout.at)),
    )


def _counts_up(numbers: Int64) -> bool:
    return bool((numbers == np.arange(len(numbers))).all())


def simple_tree(of: Int64, layout: Places, cuts: tuple[int, ...], small: int) -> Tree:
    """A tree of one level.

    of: [copies] the row that each copy is of. cuts: [chunks + 1] where chunks begin and end. small: number of rows.
    """
    return tree([(of, None if layout.full else layout.at, cuts, small)], of, layout)


def on(device: torch.device, value: Tree) -> Tree:
    """The same tree with its indices on ``device``."""
    levels = tuple(
        SumLevel(x.of.to(device), None if x.at is None else x.at.to(device), x.bounds, x.small) for x in value.levels
    )
    return Tree(levels, value.direct.to(device), None if value.blank is None else value.blank.to(device))


def _copies(rows: Tensor, shape: Tree) -> Tensor:
    if not len(rows):
        return rows.new_zeros(len(shape.direct), *rows.shape[1:])  # nothing but padding
    copies = rows.index_select(0, shape.direct)
    return copies if shape.blank is None else copies.index_fill_(0, shape.blank, 0)


def _sums(leaves: Tensor, shape: Tree) -> Tensor:
    for level in reversed(shape.levels):
        leaves = level.total(leaves)
    return leaves


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, shape: Tree) -> Tensor:
        ctx.shape = shape
        return _copies(rows, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sums(gradient, ctx.shape), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaves: Tensor, shape: Tree) -> Tensor:
        ctx.shape = shape
        return _sums(leaves, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _copies(gradient, ctx.shape), None
