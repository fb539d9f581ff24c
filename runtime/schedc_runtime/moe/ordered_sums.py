"""Copies of rows and their sums in one fixed order: the two adjoint moves of which every dispatch is made."""

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
    """Which of ``small`` rows each copy is of.

    of: [copies] rows. at: [copies] where each copy lies on the larger side; None: in order. bounds: where chunks of
    copies begin, and the end; within a chunk no row occurs twice, so that a chunk is added in one go, the same on
    every device, and chunks are added in their order.
    """

    of: Tensor
    at: Tensor | None
    bounds: tuple[int, ...]
    small: int

    def total(self, copies: Tensor) -> Tensor:
        """[larger side, ...] to [small, ...]: every row the sum of its copies, from zero, chunk after chunk."""
        result = copies.new_zeros(self.small, *copies.shape[1:])
        for start, end in pairwise(self.bounds):
            chunk = copies[start:end] if self.at is None else copies.index_select(0, self.at[start:end])
            result.index_add_(0, self.of[start:end], chunk)
        return result


@dataclass(frozen=True)
class Tree:
    """Copies of rows made level by level, trunk to leaves, which are therefore summed level by level.

    direct: [leaves] the row of the trunk that each leaf is a copy of. blank: leaves that are padding, zero.
    """

    levels: tuple[SumLevel, ...]
    direct: Tensor
    blank: Tensor | None = None

    def spread(self, rows: Tensor) -> Tensor:
        """[trunk, ...] to [leaves, ...]; its gradient is `total`."""
        result: Tensor = _Spread.apply(rows, self)  # type: ignore[no-untyped-call]
        return result

    def total(self, leaves: Tensor) -> Tensor:
        """[leaves, ...] to [trunk, ...]: sums of copies; its gradient is `spread`."""
        result: Tensor = _Total.apply(leaves, self)  # type: ignore[no-untyped-call]
        return result


@dataclass(frozen=True)
class Places:
    """Where entries lie that come in blocks, each block as long as its entries or padded to one capacity.

    at: [entries]. sizes: of the blocks, padding included. full: whether there is no padding, so that ``at`` counts up.
    """

    at: Int64
    sizes: Int64
    full: bool

    @property
    def total(self) -> int:
        return int(self.sizes.sum())


def places(blocks: Int64, count: int, capacity: int | None) -> Places:
    """Of entries sorted by block. ValueError if a block has more entries than its capacity."""
    sizes = np.bincount(blocks, minlength=count)
    if capacity is None:
        return Places(np.arange(len(blocks)), sizes, True)
    if sizes.size and int(sizes.max()) > capacity:
        raise ValueError(f"block {int(sizes.argmax())} has {int(sizes.max())} entries, its capacity is {capacity}")
    first = np.cumsum(sizes) - sizes
    at = blocks * capacity + np.arange(len(blocks)) - first[blocks]
    return Places(at, np.full(count, capacity), len(blocks) == count * capacity)


def bounds(chunks: Int64, count: int) -> tuple[int, ...]:
    """Where the chunks of entries sorted by chunk begin, and the end; chunks without entries are left out."""
    return tuple(np.unique(np.searchsorted(chunks, np.arange(count + 1))).tolist()) if len(chunks) else ()


def tree(levels: Sequence[tuple[Int64, Int64 | None, tuple[int, ...], int]], direct: Int64, laid: Places) -> Tree:
    """A tree from the columns of its `SumLevel`s; ``direct`` has an entry for each leaf that is not padding."""
    made = [
        SumLevel(torch.from_numpy(of), None if at is None or _counts_up(at) else torch.from_numpy(at), cuts, small)
        for of, at, cuts, small in levels
    ]
    # A level of one copy per row, in order, adds nothing; the last stays, so that a sum always begins from zero.
    kept = tuple(x for x in made[:-1] if x.at is not None or len(x.of) != x.small or not _counts_up(x.of.numpy()))
    if laid.full:
        return Tree((*kept, made[-1]), torch.from_numpy(direct))
    whole = np.zeros(laid.total, dtype=np.int64)
    whole[laid.at] = direct
    return Tree(
        (*kept, made[-1]), torch.from_numpy(whole), torch.from_numpy(np.setdiff1d(np.arange(laid.total), laid.at))
    )


def _counts_up(numbers: Int64) -> bool:
    return bool((numbers == np.arange(len(numbers))).all())


def simple_tree(of: Int64, laid: Places, cuts: tuple[int, ...], small: int) -> Tree:
    """A tree of one level."""
    return tree([(of, None if laid.full else laid.at, cuts, small)], of, laid)


def on(device: torch.device, value: Tree) -> Tree:
    """The same tree with its indices on another device."""
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
