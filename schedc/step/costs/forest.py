"""Which rank computes which rows of experts so that all ranks have as many: a plan in closed form.

    rows by home    385 220 139 280     limit 256 each
    surplus         129           24    homes 0 and 3, the largest first, on one line of 153 rows
    room                 36 117         ranks 2 and 1, the largest first, on the same line
    plan            home 0 gives 117 to rank 2 and 36 to rank 1; the 24 of these that are too many it gets from home 3

A rank with room has one parent: the home in whose part of the line its own part begins. The parent gives all of that
part. What lies beyond the parent's own part it gets back from the next home. Thus each rank holds experts of one other
rank at most, and E / R slots always suffice. Only own rows are given, so no row moves twice.

All numbers are whole, and all sorts are stable: ranks with the same table have the same plan.

The form is written once, over the `Operations` of a library of arrays: the compiler prices with numpy's, and the
runtime plans with torch's, on the device.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import numpy as np

from schedc.ir.arrays import Int64

Array = Any
"""An array of whole numbers of the library that `Operations` belong to."""


class Forest(NamedTuple):
    """Who computes whose rows, for a table of rows or for a batch [...] of tables.

    parent: [..., R] int64 the home whose rows a rank takes; itself for a rank that takes none. taken: [..., R] number
    of these rows. quota: [..., R, m] how many of them belong to each expert of the parent.
    """

    parent: Array
    taken: Array
    quota: Array


class Operations(Protocol):
    """What the form needs of a library of arrays. Sorts are stable; indices and lines lie along the last axis."""

    def positive(self, values: Array) -> Array:
        """[...] the values, 0 for negative ones."""
        ...

    def descending(self, values: Array) -> tuple[Array, Array]:
        """([..., n], [..., n]) the values, the largest first, and where each stood."""
        ...

    def ascending(self, values: Array) -> Array:
        """[..., n] where each value stood, the smallest first."""
        ...

    def take(self, values: Array, index: Array, axis: int = -1) -> Array:
        """The values at the indices along an axis."""
        ...

    def put(self, like: Array, index: Array, values: Array) -> Array:
        """[..., n] zeros as ``like``, and the values at their indices."""
        ...

    def add(self, into: Array, index: Array, values: Array) -> Array:
        """[..., n] ``into``, and the values added at their indices."""
        ...

    def find(self, line: Array, values: Array, right: bool = False) -> Array:
        """[..., n] the place in an ascending line before which each value fits; at most the last place.

        right: behind equal values.
        """
        ...

    def shifted(self, values: Array) -> Array:
        """[..., n] a zero, and all values but the last."""
        ...

    def rolled(self, values: Array) -> Array:
        """[..., n] all values but the first, and the first behind them."""
        ...

    def spread(self, values: Array, like: Array) -> Array:
        """The values in the shape of ``like``."""
        ...

    def numbers(self, count: int, like: Array) -> Array:
        """[count] from 0 on."""
        ...

    def where(self, condition: Array, values: Array, others: Array) -> Array: ...

    def minimum(self, values: Array, others: Array) -> Array: ...

    def maximum(self, values: Array, others: Array) -> Array: ...

    def least(self, values: Array) -> Array:
        """[..., n] the least value up to each place."""
        ...


def most_rows(ops: Operations, load: Array, within: Fraction) -> Array:
    """[..., R] the most rows of each rank. load: [..., R] int64 rows by home. within: most over mean, at least 1.

    For 1 the fullest ranks have one row more, as many as the mean leaves over. Otherwise the limit is rounded up.
    """
    ranks, total = load.shape[-1], load.sum(-1)[..., None]
    if within > 1:
        return ops.spread(-(-total * within.numerator // (ranks * within.denominator)), load)
    number = ops.spread(ops.numbers(ranks, load), load)
    rank = ops.put(load, ops.descending(load)[1], number)
    return total // ranks + (rank < total % ranks)


def closed_form(ops: Operations, rows: Array, within: Fraction) -> Forest:
    """The plan for ``rows`` [..., R, m] int64 by home and expert of the home. within: most over mean, at least 1."""
    load = rows.sum(-1)
    most = most_rows(ops, load, within)
    surplus, homes = ops.descending(ops.positive(load - most))
    room, receivers = ops.descending(ops.positive(most - load))
    given = surplus.cumsum(-1)
    filled = ops.minimum(room.cumsum(-1), given[..., -1:])
    begin = ops.shifted(filled)
    parents = ops.take(homes, ops.find(given, begin, right=True))
    beyond = ops.positive(ops.take(filled, ops.find(filled, given)) - given)  # behind the last home nothing is left
    # A rank has a surplus or room, so that what it takes is put there once.
    taken = ops.add(ops.put(load, receivers, filled - begin), homes, beyond)
    parent = ops.put(load, receivers, parents)
    behind = ops.put(load, homes, ops.rolled(homes))
    parent = ops.where(load > most, behind, parent)
    parent = ops.where(taken > 0, parent, ops.numbers(load.shape[-1], load))
    return Forest(parent, taken, _quotas(ops, rows, parent, taken))


def planned(ops: Operations, rows: Array, within: Fraction, slots: int | None) -> tuple[Forest, Array | None]:
    """The `closed_form` `within_slots`, and [..., R] rows for each rank that stay at home; None where all move."""
    plan = closed_form(ops, rows, within)
    if slots is None or slots >= rows.shape[-1]:
        return plan, None
    narrow = within_slots(ops, rows, most_rows(ops, rows.sum(-1), within), plan, slots)
    return narrow, plan.taken - narrow.taken


def _quotas(ops: Operations, rows: Array, parent: Array, taken: Array) -> Array:
    """[..., R, m] `Forest.quota`: a home's experts and its children, both largest first, overlap on one line."""
    sizes, experts = ops.descending(rows)
    ends = sizes.cumsum(-1)
    theirs = ops.spread(parent[..., None], rows)
    begins = ops.take(ends - sizes, theirs, -2)
    ends, order = ops.take(ends, theirs, -2), ops.take(experts, theirs, -2)
    first = _places_on_line(ops, parent, taken)[..., None]
    overlap = ops.minimum(ends, first + taken[..., None]) - ops.maximum(begins, first)
    return ops.put(rows, order, ops.positive(overlap))


def _places_on_line(ops: Operations, parent: Array, taken: Array) -> Array:
    """[..., R] rows that children before each rank take of its parent."""
    order = ops.descending(taken)[1]
    order = ops.take(order, ops.ascending(ops.take(parent, order)))
    sorted_taken = ops.take(taken, order)
    by_parent = ops.add(taken * 0, parent, taken)
    before = ops.take(by_parent.cumsum(-1) - by_parent, ops.take(parent, order))
    return ops.put(taken, order, sorted_taken.cumsum(-1) - sorted_taken - before)


def within_slots(ops: Operations, rows: Array, most: Array, plan: Forest, slots: int) -> Forest:
    """The plan with at most ``slots`` experts on a rank: those with the most rows. Rows of others stay at home.

    A home then takes rows of the next one only as far as it has given more than its surplus. So no rank computes more
    than its limit, or than its own rows where these are more. Homes lie on a line, the largest surplus first. What home
    i takes is at most its copies q(i), and at most what home i - 1 takes, plus its change d(i): rows given to ranks
    with room, less its surplus. That is the least over j <= i of q(j) + d(j + 1) + ... + d(i), from 0 on.

    rows: [..., R, m] by home. most: [..., R] limits. plan: the `closed_form` of both.
    """
    over = rows.sum(-1) - most
    quota, order = ops.descending(plan.quota)
    quota = quota * (ops.numbers(quota.shape[-1], quota) < slots)
    taken = quota.sum(-1)
    given = ops.add(0 * taken, plan.parent, taken * (over <= 0))
    homes = ops.descending(ops.positive(over))[1]
    line = ops.take(given - ops.positive(over), homes).cumsum(-1)
    free = line + ops.minimum(ops.least(ops.take(taken, homes) - line), 0 * line)
    taken = ops.where(over > 0, ops.put(taken, homes, ops.positive(free)), taken)
    quota = ops.minimum(quota, ops.positive(taken[..., None] - (quota.cumsum(-1) - quota)))
    parent = ops.where(taken > 0, plan.parent, ops.numbers(taken.shape[-1], taken))
    return Forest(parent, taken, ops.put(quota, order, quota))


def rows_on_ranks(ops: Operations, rows: Array, forest: Forest) -> Array:
    """[..., R, R, m] rows by the rank that computes them, their home, and the home's expert. rows: [..., R, m]."""
    everyone = ops.numbers(rows.shape[-2], rows)
    lent = (forest.parent[..., None] == everyone)[..., None] * forest.quota[..., None, :]
    own = (everyone[:, None] == everyone)[..., None]
    return lent + own * (rows - lent.sum(-3))[..., None, :, :]


class NumpyOperations:
    """`Operations` on numpy's arrays, on the host."""

    def positive(self, values: Array) -> Array:
        return np.maximum(values, 0)

    def descending(self, values: Array) -> tuple[Array, Array]:
        order = np.argsort(-values, axis=-1, kind="stable")
        return np.take_along_axis(values, order, -1), order

    def ascending(self, values: Array) -> Array:
        return np.argsort(values, axis=-1, kind="stable")

    def take(self, values: Array, index: Array, axis: int = -1) -> Array:
        return np.take_along_axis(values, index, axis)

    def put(self, like: Array, index: Array, values: Array) -> Array:
        result = np.zeros_like(like)
        np.put_along_axis(result, index, values, -1)
        return result

    def add(self, into: Array, index: Array, values: Array) -> Array:
        result, flat = into.copy(), index.reshape(-1, index.shape[-1])
        row = np.arange(len(flat))[:, None]
        np.add.at(result.reshape(flat.shape), (row, flat), values.reshape(flat.shape))
        return result

    def find(self, line: Array, values: Array, right: bool = False) -> Array:
        length = line.shape[-1]
        flat, sought = line.reshape(-1, length), values.reshape(-1, length)
        row = np.arange(len(flat))[:, None]
        apart = row * (max(int(line.max(initial=0)), int(values.max(initial=0))) + 1)
        place = np.searchsorted((flat + apart).ravel(), (sought + apart).ravel(), "right" if right else "left")
        return np.minimum(place.reshape(flat.shape) - row * length, length - 1).reshape(values.shape)

    def shifted(self, values: Array) -> Array:
        return np.concatenate([np.zeros_like(values[..., :1]), values[..., :-1]], axis=-1)

    def rolled(self, values: Array) -> Array:
        return np.roll(values, -1, axis=-1)

    def spread(self, values: Array, like: Array) -> Array:
        return np.broadcast_to(values, like.shape)

    def numbers(self, count: int, like: Array) -> Array:
        return np.arange(count)

    def where(self, condition: Array, values: Array, others: Array) -> Array:
        return np.where(condition, values, others)

    def minimum(self, values: Array, others: Array) -> Array:
        return np.minimum(values, others)

    def maximum(self, values: Array, others: Array) -> Array:
        return np.maximum(values, others)

    def least(self, values: Array) -> Array:
        return np.minimum.accumulate(values, axis=-1)


NUMPY = NumpyOperations()


def forest_of(rows: Int64, within: Fraction, slots: int | None = None) -> Forest:
    """The plan for ``rows`` [..., R, m] on the host. slots: copies that a rank can hold; None: as many as it needs."""
    return planned(NUMPY, rows, within, slots)[0]
