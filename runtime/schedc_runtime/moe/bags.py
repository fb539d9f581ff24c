"""Copies rows and sums the copies in one fixed order: the two adjoint moves that make up every dispatch.

    spread   trunk [rows, ...] to leaves [copies, ...]      each leaf copies one row of the trunk, or is padding
    total    leaves [copies, ...] to trunk [rows, ...]      each row sums its copies, from zero and in one order

Sums run in bags: one reduction per level adds the entries of a row one after the other. A row is summed in float32 at
least and rounded once per level. Nothing here asks for a value: lists have lengths that are known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.transport.rows import RowFormat

_UNREAD = 64
"""The most entries of a bag that nobody reads: a device adds the entries of a bag one after the other."""


@dataclass(frozen=True)
class Bags:
    """The entries that each row sums, in their order.

    at: [entries] index of each entry among the summands. offsets: [bags] where the entries of each bag begin. The first
    is 0, and the last bag runs to the end of the entries. rows: how many bags are rows: the first ones.
    """

    at: Tensor
    offsets: Tensor
    rows: int

    @staticmethod
    def of(at: Tensor, ends: Tensor, *, padded: bool) -> Bags:
        """The bags of rows whose entries lie between neighbours of ``ends`` [rows + 1], from 0 on.

        padded: whether entries of ``at`` [entries] may lie behind the last end; ends behind the last entry are cut.
        torch gives such entries to the last bag, on a CPU or on a GPU. Here bags that nobody reads take them.
        """
        rows = len(ends) - 1
        if padded:
            unread = torch.arange(_UNREAD, max(len(at), _UNREAD), _UNREAD, device=at.device).clamp_(min=ends[-1])
            ends = torch.cat((ends, unread)).clamp_(max=len(at))
        return Bags(at, ends, rows)

    def total(self, summands: Tensor) -> Tensor:
        """[summands, ...] to [rows, ...]."""
        if not self.rows or not len(summands):
            return summands.new_zeros(self.rows, *summands.shape[1:])
        flat = summands.reshape(len(summands), -1)
        sums = functional.embedding_bag(self.at, flat, self.offsets, mode="sum")[: self.rows]
        return sums.view(self.rows, *summands.shape[1:])


class Tree(Protocol):
    """Copies of rows, and sums of the copies."""

    @property
    def leaves(self) -> int:
        """Number of copies."""
        ...

    def copies(self, rows: Tensor, out: Tensor | None = None, padding: int = 0) -> Tensor:
        """[trunk, ...] to [leaves, ...], written to ``out`` where there is one."""
        ...

    def sums(self, leaves: Tensor) -> Tensor:
        """[leaves, ...] to [trunk, ...]."""
        ...


@dataclass(frozen=True)
class _Direct:
    """direct: [leaves] the row that each leaf copies. blank: [leaves] which leaves are padding; None: none of them."""

    direct: Tensor
    blank: Tensor | None = field(default=None, kw_only=True)

    @property
    def leaves(self) -> int:
        return len(self.direct)

    def copies(self, rows: Tensor, out: Tensor | None = None, padding: int = 0) -> Tensor:
        return taken(rows, self.direct, self.blank, out, padding)


@dataclass(frozen=True)
class Copies(_Direct):
    """Any number of copies of each row. levels: the sums, from the leaves to the trunk."""

    levels: tuple[Bags, ...]

    def sums(self, leaves: Tensor) -> Tensor:
        for level in self.levels:
            leaves = level.total(leaves)
        return leaves


@dataclass(frozen=True)
class Moves(_Direct):
    """One leaf of each row at most: both directions gather.

    back: [trunk] the leaf that each row is. absent: [trunk] which rows are no leaf; None: none of them.
    """

    back: Tensor
    absent: Tensor | None = field(default=None, kw_only=True)

    def sums(self, leaves: Tensor) -> Tensor:
        return taken(leaves, self.back, self.absent)


def taken(rows: Tensor, index: Tensor, blank: Tensor | None, out: Tensor | None = None, padding: int = 0) -> Tensor:
    """[rows, ...] to [index, ...]: the rows of ``index`` [index], and ``padding`` where ``blank`` [index] is set.

    out: [index, ...] where to write them; it may have any strides.
    """
    if not len(rows):  # nothing but padding
        shape = (len(index), *rows.shape[1:])
        return rows.new_full(shape, padding) if out is None else out.fill_(padding)
    result = torch.index_select(rows, 0, index) if out is None else torch.index_select(rows, 0, index, out=out)
    if blank is None:
        return result
    return result.masked_fill_(blank.view(-1, *[1] * (rows.dim() - 1)), padding)


def spread(tree: Tree, rows: Tensor) -> Tensor:
    """[trunk, ...] to [leaves, ...]: copies. The gradient is `total`."""
    result: Tensor = _Moved.apply(rows, tree, False)  # type: ignore[no-untyped-call]
    return result


def spread_together(parts: Sequence[tuple[Tree, Tensor]], padding: Sequence[int]) -> tuple[Tensor, ...]:
    """Copies as by `spread`, side by side in one buffer of rows, which an exchange sends as it is.

    parts: trees with as many leaves, each with its [trunk, ...]. padding: of each part. Whole numbers have no gradient.
    """
    trees, rows = zip(*parts, strict=True)
    result: tuple[Tensor, ...] = _SpreadTogether.apply(trees, padding, *rows)  # type: ignore[no-untyped-call]
    return result


def total(tree: Tree, leaves: Tensor) -> Tensor:
    """[leaves, ...] to [trunk, ...]: sums of copies. The gradient is `spread`."""
    result: Tensor = _Moved.apply(leaves, tree, True)  # type: ignore[no-untyped-call]
    return result


class _Moved(torch.autograd.Function):
    """Copies of the trunk, or sums of the leaves. The gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, tree: Tree, summed: bool) -> Tensor:
        ctx.tree, ctx.summed = tree, summed
        return tree.sums(tensor) if summed else tree.copies(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tree.copies(gradient) if ctx.summed else ctx.tree.sums(gradient), None, None


class _SpreadTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trees: Sequence[Tree], padding: Sequence[int], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.trees = trees
        form = RowFormat.of(rows)
        views = form.views(form.new_buffer(trees[0].leaves, rows[0].device))
        for tree, part, view, blank in zip(trees, rows, views, padding, strict=True):
            tree.copies(part, view, blank)
        ctx.mark_non_differentiable(*[view for view in views if not view.is_floating_point()])
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        sums = [
            tree.sums(gradient) if needed else None
            for tree, gradient, needed in zip(ctx.trees, gradients, wanted, strict=True)
        ]
        return None, None, *sums
