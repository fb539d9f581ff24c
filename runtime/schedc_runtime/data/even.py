"""Sums made even: numbers shared by bins that all take as many, the largest first, and then improved by swaps."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Int64

_NEAR = 1 << 13
"""Swaps end where the fullest bin is within 1 / 2^13 of what no sharing undercuts."""
_MOST_PAIRS = 1 << 20
"""Most swaps of two rows for two that are compared at once; where there are more, rows are swapped one by one."""


class EvenBound(NamedTuple):
    """What no sharing undercuts. ratio: of the fullest bin's sum over the mean, from 1 on.

    row: the smallest of the large rows that set the bound; -1 where the mean itself is the bound.
    """

    ratio: float
    row: int


def even_bound(costs: Int64, bins: int) -> EvenBound:
    """The bound of the fullest bin, from how many large rows some bins must take.

    k * bins + r rows are large. Either a bin has k + 2 of them, or r bins have k + 1 each, and one of these has their
    mean at least. Both weigh least where their large rows are the smallest of these, and their other rows the smallest
    of all. With one large row: (largest + m - 1 smallest) / mean. With all rows: the mean.

    costs: [bins * m] whole numbers.
    """
    fullest, row = _least_fullest(costs, bins)
    return EvenBound(fullest * bins / max(1, int(costs.sum())), row)


def _least_fullest(costs: Int64, bins: int) -> tuple[int, int]:
    """A sum that the fullest bin has at least, and the row that sets it."""
    descending = np.argsort(-costs, kind="stable")
    sums, each = np.concatenate(([0], np.cumsum(costs[descending]))), costs.size // bins
    large = np.arange(1, costs.size + 1)
    k = (large - 1) // bins

    def lightest(of: Int64, among: Int64) -> Int64:
        """Sums of ``among`` bins that have ``of`` large rows each."""
        rest = costs.size - among * (each - of)
        some: Int64 = (
            sums[large] - sums[np.maximum(large - among * of, 0)] + sums[-1] - sums[np.minimum(rest, costs.size)]
        )
        return some

    r = large - k * bins
    spread = -(-lightest(k + 1, r) // r)
    heaped = np.where((k + 2 <= each) & (k + 2 <= large), lightest(k + 2, np.ones_like(r)), sums[-1])
    least = np.minimum(spread, heaped)
    most = int(least.argmax())
    return int(least[most]), -1 if least[most] == least[-1] else int(descending[most])


def even_sums(costs: Int64, bins: int) -> Int64:
    """[bins, m] numbers of rows: each bin takes m rows, and the sums of their costs are nearly even.

    Rows go, the largest first, to the bin with the least sum that is not full (Graham, 1969, LPT). Then rows of the
    fullest bin are swapped for others, one by one or two by two, while that makes it less full.

    costs: [bins * m] whole numbers.
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
    bins, each = rows.shape
    sums = costs[rows].sum(axis=1)
    least = _least_fullest(costs, bins)[0]
    alone, pairs = np.arange(each)[:, None], np.stack(np.triu_indices(each, 1), axis=1)
    kinds = (alone, pairs) if bins * len(pairs) ** 2 <= _MOST_PAIRS else (alone,)
    for _ in range(costs.size * 4):
        if int(sums.max()) <= least + least // _NEAR or not any(_swap(rows, costs, sums, places) for places in kinds):
            break
    return rows


def _swap(rows: Int64, costs: Int64, sums: Int64, places: Int64) -> bool:
    """Swap some rows of the fullest bin for as many of another, if that makes it less full: the best such swap.

    rows, sums: changed in place. places: [ways, 1 or 2] places in a bin whose rows may be swapped.
    """
    full, given = int(sums.argmax()), costs[rows[:, places]].sum(axis=2)
    less = given[full][:, None] - given.reshape(1, -1)
    both = np.maximum(sums[full] - less, np.repeat(sums, len(places)) + less)
    best = int(both.argmin())
    if both.flat[best] >= sums[full]:
        return False
    mine, (other, its) = best // given.size, divmod(best % given.size, len(places))
    moved = int(less.flat[best])
    kept = rows[full, places[mine]]
    rows[full, places[mine]] = rows[other, places[its]]
    rows[other, places[its]] = kept
    sums[full] -= moved
    sums[other] += moved
    return True
