"""Copies rows and sums the copies in one fixed order: the two adjoint moves that make up every dispatch.

    spread   trunk [rows, ...] to leaves [copies, ...]      each leaf copies one row of the trunk, or is padding
    total    leaves [copies, ...] to trunk [rows, ...]      each row sums its copies, from zero and in one order

Sums run in bags: one reduction per level adds the entries of a row one after the other. A row is summed in float32 at
least and rounded once per level. Nothing here asks for a value: lists have lengths that are known beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Bags:
    """The entries that each row sums, in their order.

    at: [entries] index of each entry among the summands. offsets: [rows + 1] where the entries of a row begin and end.
    Entries behind the last offset are not read.
    """

    at: Tensor
    offsets: Tensor

    def total(self, summands: Tensor) -> Tensor:
        """[summands, ...] to [rows, ...]."""
        rows = len(self.offsets) - 1
        if not rows or not len(summands):
            return summands.new_zeros(rows, *summands.shape[1:])
        flat = summands.reshape(len(summands), -1)
        if flat.dtype is torch.float64:  # on a CPU the last bag of doubles would go on to the end of the entries
            sums = functional.embedding_bag(self.at, flat, self.offsets, mode="sum")[:rows]
        else:
            sums = functional.embedding_bag(self.at, flat, self.offsets, mode="sum", include_last_offset=True)
        return sums.view(rows, *summands.shape[1:])


def offsets(counts: Tensor) -> Tensor:
    """[rows + 1] where bags of ``counts`` [rows] entries begin and end."""
    return functional.pad(counts.cumsum(0), (1, 0))


class Tree(Protocol):
    """Copies of rows, and sums of the copies."""

    def copies(self, rows: Tensor) -> Tensor:
        """[trunk, ...] to [leaves, ...]; padding is zero."""
        ...

    def sums(self, leaves: Tensor) -> Tensor:
        """[leaves, ...] to [trunk, ...]."""
        ...


@dataclass(frozen=True)
class Copies:
    """Any number of copies of each row.

    direct: [leaves] the row that each leaf copies. levels: the sums, from the leaves to the trunk. blank:
    [leaves] which leaves are padding; None: none of them.
    """

    direct: Tensor
    levels: tuple[Bags, ...]
    blank: Tensor | None = None

    def copies(self, rows: Tensor) -> Tensor:
        return taken(rows, self.direct, self.blank)

    def sums(self, leaves: Tensor) -> Tensor:
        for level in self.levels:
            leaves = level.total(leaves)
        return leaves


@dataclass(frozen=True)
class Moves:
    """One leaf of each row at most: both directions gather.

    direct: [leaves] the row that each leaf is. back: [trunk] the leaf that each row is. blank, absent: [leaves] and
    [trunk] which of them have no partner; None: none of them.
    """

    direct: Tensor
    back: Tensor
    blank: Tensor | None = None
    absent: Tensor | None = None

    def copies(self, rows: Tensor) -> Tensor:
        return taken(rows, self.direct, self.blank)

    def sums(self, leaves: Tensor) -> Tensor:
        return taken(leaves, self.back, self.absent)


def taken(rows: Tensor, index: Tensor, blank: Tensor | None) -> Tensor:
    """[rows, ...] to [index, ...]: the rows of ``index`` [index], and zeros where ``blank`` [index] is set."""
    if not len(rows):
        return rows.new_zeros(len(index), *rows.shape[1:])  # nothing but padding
    result = rows.index_select(0, index)
    if blank is None:
        return result
    return result.masked_fill_(blank.view(-1, *[1] * (rows.dim() - 1)), 0)


def spread(tree: Tree, rows: Tensor) -> Tensor:
    """[trunk, ...] to [leaves, ...]: copies. The gradient is `total`."""
    result: Tensor = _Spread.apply(rows, tree)  # type: ignore[no-untyped-call]
    return result


def total(tree: Tree, leaves: Tensor) -> Tensor:
    """[leaves, ...] to [trunk, ...]: sums of copies. The gradient is `spread`."""
    result: Tensor = _Total.apply(leaves, tree)  # type: ignore[no-untyped-call]
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tree: Tree) -> Tensor:
        ctx.tree = tree
        return tree.copies(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tree.sums(gradient), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaves: Tensor, tree: Tree) -> Tensor:
        ctx.tree = tree
        return tree.sums(leaves)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tree.copies(gradient), None
