"""Where the rows of a batch lie in a tensor, and where they lie behind a view of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class RowPlace(NamedTuple):
    """The rows lie in dimension ``dim``, whose size is ``outer * rows * inner``; its index is (outer, row, inner).

    What lies at a row follows from that row of the batch alone, not from its number.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> RowPlace:
        """The same in another dimension."""
        return RowPlace(dim, self.outer, self.inner)


def layout_candidates(shape: Sequence[int], rows: int) -> Iterator[RowPlace]:
    """Where rows may lie in a tensor: behind or ahead of all else that is folded with them."""
    for dim, size in enumerate(shape):
        if size % rows == 0:
            yield from dict.fromkeys((RowPlace(dim, 1, size // rows), RowPlace(dim, size // rows, 1)))


def viewed(layout: RowPlace, before: Sequence[int], after: Sequence[int], rows: int) -> RowPlace | None:
    """Where the rows are in a tensor of the shape ``after`` that has the order of one of the shape ``before``.

    None where the new dimensions cut across rows. rows: their number, a prime that divides no other size.
    """
    outer, ahead = prod(before[: layout.dim]) * layout.outer, 1
    for dim, size in enumerate(after):
        own = outer // ahead
        if outer % ahead == 0 and size % (own * rows) == 0:
            return RowPlace(dim, own, size // (own * rows))
        ahead *= size
    return None


def in_memory(layout: RowPlace, shape: Sequence[int], stride: Sequence[int], other: Sequence[int],
              other_stride: Sequence[int], rows: int) -> RowPlace | None:  # fmt: skip
    """Where the rows are in another tensor of the same memory; None where it does not have all of them.

    shape, stride: those of the tensor whose place of rows is known. other, other_stride: those of the other tensor, in
    elements.
    """
    step = stride[layout.dim] * layout.inner
    for dim, size in enumerate(other):
        own = other_stride[dim]
        if own and step % own == 0 and size % (rows * (step // own)) == 0:
            return RowPlace(dim, size // (rows * (step // own)), step // own)
    return None


def sliced_layout(layout: RowPlace, start: int, length: int, rows: int) -> RowPlace | None:
    """Where the rows are in ``length`` indices from ``start`` on, of the dimension of the rows.

    None where some rows are not in there. Whole blocks of all rows may be taken out.
    """
    block = rows * layout.inner
    if start % block or length % block or not length:
        return None
    return layout._replace(outer=length // block)


def scaled(first: Sequence[int], rows_first: int, shape: Sequence[int], rows: int) -> list[int]:
    """The dimensions that grow with the number of rows. first: the shape of the tensor for ``rows_first`` rows."""
    if len(first) != len(shape):
        return []
    return [d for d, (a, b) in enumerate(zip(first, shape, strict=True)) if a != b and a * rows == b * rows_first]
