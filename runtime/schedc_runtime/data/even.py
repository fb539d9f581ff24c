"""Sums made even: numbers shared by bins that all take as many, the largest first, and then improved by swaps."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Int64

_NEAR = 1 << 13
"""Swaps end where the fullest bin is within 1 / 2^13 of what no sharing undercuts."""


class EvenBound(NamedTuple):
    """What no sharing undercuts. ratio: of the fullest bin's sum over the mean, from 1 on.

    row: the largest row that finds no bin without as many larger ones as all others have; -1 where the mean itself is
        the bound.
    """

    ratio: float
    row: int


def even_bound(costs: Int64, bins: int) -> EvenBound:
    """The bound of the fullest bin, from how many large rows some bin must take.

    Some bin has k + 1 of the k * bins + 1 largest rows. It weighs least where they are the smallest of these, and where
    its other rows are the smallest of all. With k = 0: (largest + m - 1 smallest) / mean.

    costs: [bins * m] whole numbers.
    """
    fullest, row = _least_fullest(costs, bins)
    ratio = fullest * bins / max(1, int(costs.sum()))
    return EvenBound(ratio, row) if ratio > 1 else EvenBound(1.0, -1)


def _least_fullest(costs: Int64, bins: int) -> tuple[int, int]:
    """A sum that the fullest bin has at least, and the row that sets it."""
    descending = np.argsort(-costs, kind="stable")
    sums, each = np.concatenate(([0], np.cumsum(costs[descending]))), costs.size // bins
    taken = np.arange(each)
    last = taken * bins
    large = sums[last + 1] - sums[last - taken]
    small = sums[-1] - sums[costs.size - (each - taken - 1)]
    most = int((large + small).argmax())
    return int((large + small)[most]), int(descending[last[most]])


def even_sums(costs: Int64, bins: int) -> Int64:
    """[bins, m] numbers of rows: each bin takes m rows, and the sums of their costs are nearly even.

    Rows go, the largest first, to the bin with the least sum that is not full (Graham, 1969, LPT). Then rows of the
    fullest bin are swapped for others while that makes it less full. costs: [bins * m] whole numbers.
    """
    each = costs.size // bins
    shared: list[list[int]] = [[] for _ in range(bins)]
    open_bins = [(0, number) for number in range(bins)]
    heapify(open_bins)
    for row in np.argsort(-costs, kind="stable").tolist():
        total, number = heappop(open_bins)
        shared[number].append(row)
        if len(shared[number]) < each:
            heappush(open_bins, (total + int(costs[row]), number))
    rows = np.array(shared, np.int64).reshape(bins, each)
    return _swapped(rows, costs) if bins > 1 and each > 1 else rows


def _swapped(rows: Int64, costs: Int64) -> Int64:
    """[bins, m] the rows after swaps. Each one makes the fullest bin less full, and no other as full as it was."""
    each = rows.shape[1]
    sums = costs[rows].sum(axis=1)
    least = max(-(-int(costs.sum()) // len(rows)), _least_fullest(costs, len(rows))[0])
    for _ in range(costs.size * 4):
        full = int(sums.argmax())
        if int(sums[full]) <= least + least // _NEAR:
            break
        less = costs[rows[full]][:, None] - costs[rows].reshape(1, -1)
        both = np.maximum(sums[full] - less, np.repeat(sums, each) + less)
        place = int(both.argmin())
        if both.flat[place] >= sums[full]:
            break
        mine, (other, its) = place // rows.size, divmod(place % rows.size, each)
        moved = int(less.flat[place])
        rows[full, mine], rows[other, its] = rows[other, its], rows[full, mine]
        sums[full] -= moved
        sums[other] += moved
    return rows
