"""Copies rows and sums the copies in one fixed order: the two adjoint moves that make up every dispatch.

    spread   trunk [rows, ...] to leaves [copies, ...]      each leaf copies one row of the trunk, or is padding
    total    leaves [copies, ...] to trunk [rows, ...]      each row sums its copies, from zero and in one order

Each move is one operation of torch: `permute` writes copies of several tensors, `combine` adds.

Sums run in bags: one reduction per level adds the entries of a row one after the other. A row is summed in float32 at
least and rounded once per level. Nothing here asks for a value: lists have lengths that are known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from schedc_runtime.kernels.library import operation
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

    def total(self, summands: Tensor) -> Tensor:
        """[summands, ...] to [rows, ...]."""
        if not self.rows or not len(summands):
            return summands.new_zeros(self.rows, *summands.shape[1:])
        flat = summands.reshape(len(summands), -1)
        sums = functional.embedding_bag(self.at, flat, self.offsets, mode="sum")[: self.rows]
        return sums.view(self.rows, *summands.shape[1:])


def ended(at: Tensor, ends: Tensor, *, padded: bool) -> tuple[Tensor, Tensor]:
    """``at`` and ``offsets`` of `Bags` whose entries lie between neighbours of ``ends`` [rows + 1], from 0 on.

    padded: whether entries of ``at`` [entries] may lie behind the last end; ends behind the last entry are cut. torch
    gives such entries to the last bag, on a CPU or on a GPU. Here they go to bags behind those of rows.
    """
    if padded:
        unread = torch.arange(_UNREAD, max(len(at), _UNREAD), _UNREAD, device=at.device).clamp_(min=ends[-1])
        ends = torch.cat((ends, unread)).clamp_(max=len(at))
    return at, ends


def _combine(summands: Tensor, at: Sequence[Tensor], offsets: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    for level in map(Bags, at, offsets, rows):
        summands = level.total(summands)
    return summands


_combined = operation(
    "combine(Tensor summands, Tensor[] at, Tensor[] offsets, int[] rows) -> Tensor", _combine, "moves:launch_combine"
)


def combined(summands: Tensor, levels: Sequence[Bags]) -> Tensor:
    """[summands, ...] to [rows of the last level, ...]: the sums of one level are the summands of the next."""
    at, offsets, rows = zip(*[(bags.at, bags.offsets, bags.rows) for bags in levels], strict=True)
    sums: Tensor = _combined(summands, at, offsets, rows)
    return sums


def _permute(
    rows: Sequence[Tensor], at: Sequence[Tensor], blank: Sequence[Tensor | None], padding: Sequence[int],
    out: Sequence[Tensor],
) -> None:  # fmt: skip
    for part, index, empty, number, target in zip(rows, at, blank, padding, out, strict=True):
        if not len(part):  # nothing but padding
            target.fill_(number)
            continue
        torch.index_select(part, 0, index, out=target)
        if empty is not None:
            target.masked_fill_(empty.view(-1, *[1] * (part.dim() - 1)), number)


permute = operation(
    "permute(Tensor[] rows, Tensor[] at, Tensor?[] blank, int[] padding, Tensor(a!)[] out) -> ()",
    _permute,
    "moves:launch_permute",
)
"""Writes to each of ``out`` [copies, ...] the rows ``at`` [copies] of a tensor, and padding where ``blank`` is set."""


class Take(NamedTuple):
    """Which row each entry of a list copies: ``at`` [entries]; and which are none: ``blank`` [entries], or None."""

    at: Tensor
    blank: Tensor | None = None


class Tree(Protocol):
    """Copies of rows, and sums of the copies."""

    @property
    def copies(self) -> Take:
        """The row of the trunk that each leaf copies."""
        ...

    def sums(self, leaves: Tensor) -> Tensor:
        """[leaves, ...] to [trunk, ...]."""
        ...


class Copies(NamedTuple):
    """Any number of copies of each row. levels: the sums, from the leaves to the trunk."""

    copies: Take
    levels: tuple[Bags, ...]

    def sums(self, leaves: Tensor) -> Tensor:
        """[leaves, ...] to [trunk, ...]."""
        return combined(leaves, self.levels)


class Moves(NamedTuple):
    """One leaf of each row at most: both directions gather. back: the leaf that each row is."""

    copies: Take
    back: Take

    def sums(self, leaves: Tensor) -> Tensor:
        """[leaves, ...] to [trunk, ...]."""
        return _taken([leaves], [self.back])[0]


def _taken(rows: Sequence[Tensor], takes: Sequence[Take]) -> list[Tensor]:
    """[rows, ...] to [entries, ...] of each pair, with zeros where an entry is none."""
    result = [part.new_empty(len(take.at), *part.shape[1:]) for part, take in zip(rows, takes, strict=True)]
    permute(rows, [take.at for take in takes], [take.blank for take in takes], [0] * len(rows), result)
    return result


def spread(*parts: tuple[Tree, Tensor]) -> tuple[Tensor, ...]:
    """[trunk, ...] to [leaves, ...] of each pair: copies. The gradient is `total`."""
    trees, rows = zip(*parts, strict=True)
    result: tuple[Tensor, ...] = _Spread.apply(trees, None, *rows)  # type: ignore[no-untyped-call]
    return result


def spread_together(parts: Sequence[tuple[Tree, Tensor]], padding: Sequence[int]) -> tuple[Tensor, ...]:
    """Copies as by `spread`, side by side in one buffer of rows, which an exchange sends as it is.

    parts: trees with as many leaves, each with its [trunk, ...]. padding: of each part. Whole numbers have no gradient.
    """
    trees, rows = zip(*parts, strict=True)
    result: tuple[Tensor, ...] = _Spread.apply(trees, padding, *rows)  # type: ignore[no-untyped-call]
    return result


def total(tree: Tree, leaves: Tensor) -> Tensor:
    """[leaves, ...] to [trunk, ...]: sums of copies. The gradient is `spread`."""
    result: Tensor = _Total.apply(leaves, tree)  # type: ignore[no-untyped-call]
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trees: Sequence[Tree], padding: Sequence[int] | None, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.trees = trees
        takes = [tree.copies for tree in trees]
        if padding is None:
            return tuple(_taken(rows, takes))
        form = RowFormat.of(rows)
        views = form.views(form.new_buffer(len(takes[0].at), rows[0].device))
        permute(rows, [take.at for take in takes], [take.blank for take in takes], padding, views)
        ctx.mark_non_differentiable(*[view for view in views if not view.is_floating_point()])
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        pairs = list(zip(ctx.trees, gradients, strict=True))
        if all(wanted) and all(isinstance(tree, Moves) for tree, _ in pairs):
            return None, None, *_taken(gradients, [tree.back for tree, _ in pairs])
        sums = [tree.sums(gradient) if needed else None for (tree, gradient), needed in zip(pairs, wanted, strict=True)]
        return None, None, *sums


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaves: Tensor, tree: Tree) -> Tensor:
        ctx.tree = tree
        return tree.sums(leaves)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _taken([gradient], [ctx.tree.copies])[0], None
