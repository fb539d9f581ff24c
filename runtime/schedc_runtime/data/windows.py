"""Windows of steps: documents in a drawn order are packed into rows, and alike rows of several steps share a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Int64
from schedc_runtime.data.drawn import places, shuffled
from schedc_runtime.data.lengths import Lengths
from schedc_runtime.data.row_costs import RowCosts
from schedc_runtime.errors import RuntimeFault

_ORDER, _STEPS = 0, 1
"""What a seed is used for: the order of documents, the order of a window's steps."""


class DataPlace(NamedTuple):
    """A place in the data. document: documents of the epoch in front of the window. step: of the window."""

    epoch: int
    document: int
    step: int


class PackedRow(NamedTuple):
    """A row of documents, one behind the other. documents, lengths: [documents] numbers, and lengths in tokens."""

    documents: Int64
    lengths: Int64


@dataclass(frozen=True, eq=False)
class Window:
    """The rows of several steps. documents: how many of the epoch it takes.

    rows: all of them. costs: [rows] theirs. cut: [steps, rows of a step] numbers of rows.
    """

    documents: int
    rows: tuple[PackedRow, ...]
    costs: Int64
    cut: Int64


@dataclass(frozen=True)
class Windows:
    """The steps of a run as a function of seed, epoch, place and lengths. Numbers of replicas do not enter.

    rows: of a step, over all replicas. tokens: of a row. costs: of rows. steps: of a window; with 1 the rows of a step
    follow each other as they were drawn. seed: a whole number.

    The rows of a longer window are sorted by cost and cut into steps, which are shuffled. So rows of a step cost nearly
    alike. A step then has more of one length than the data, which a short training may notice.
    """

    rows: int
    tokens: int
    costs: RowCosts
    steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rows, self.tokens, self.steps) < 1:
            raise RuntimeFault(f"{self} has no rows", "give numbers from 1 on")

    def cut(self, costs: Int64, *seeds: int) -> Int64:
        """[steps, rows] numbers of the rows of each step. costs: [steps * rows]. seeds: of the order of steps."""
        if self.steps == 1:
            return np.arange(costs.size, dtype=np.int64)[None]
        alike = np.argsort(-costs, kind="stable").reshape(self.steps, self.rows)
        return alike[shuffled(self.steps, self.seed, _STEPS, *seeds)]

    def at(self, place: DataPlace, lengths: Lengths) -> Window | None:
        """The window that begins at a place; None where the epoch has too few documents left."""
        count = self.steps * self.rows
        rows, taken = self._packed(place, lengths, count)
        if rows is None:
            return None
        costs = self.costs.of([row.lengths for row in rows])
        return Window(taken, rows, costs, self.cut(costs, place.epoch, place.document))

    def _packed(self, place: DataPlace, lengths: Lengths, count: int) -> tuple[tuple[PackedRow, ...] | None, int]:
        """``count`` rows, and how many documents they take. A document goes to the first row that has room for it.

        The first document without room begins the next window.
        """
        room, taken = np.full(count, self.tokens, np.int64), 0
        documents: list[list[int]] = [[] for _ in range(count)]
        sizes: list[list[int]] = [[] for _ in range(count)]
        while place.document + taken < lengths.count:
            first = place.document + taken
            wanted = np.arange(first, min(first + 4 * count, lengths.count), dtype=np.int64)
            numbers = places(wanted, lengths.count, self.seed, _ORDER, place.epoch)
            for number, size in zip(numbers.tolist(), lengths.read(numbers, self.tokens).tolist(), strict=True):
                row = int((room >= size).argmax())
                if room[row] < size:
                    return _rows(documents, sizes), taken
                documents[row].append(number)
                sizes[row].append(size)
                room[row] -= size
                taken += 1
        return (_rows(documents, sizes) if documents[-1] else None), taken


def _rows(documents: list[list[int]], sizes: list[list[int]]) -> tuple[PackedRow, ...]:
    pairs = zip(documents, sizes, strict=True)
    return tuple(PackedRow(np.array(numbers, np.int64), np.array(own, np.int64)) for numbers, own in pairs)
