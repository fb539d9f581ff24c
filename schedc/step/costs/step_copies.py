"""Which experts each rank borrows for a step, so that every microbatch can divide its rows evenly.

    rows of a microbatch    385 220 139 280    256 each
    leaves                  2 under 0, 1 under 3    the emptiest rank under the fullest
    chain                   0 gives 3 the rows that 3 and those behind it lack
    borrowed                experts of the parent that a rank's part of its rows touches, with a margin

A rank borrows from one other rank, its parent. A leaf lacks so many rows that noise never turns its flow. The others
lie in an order whose prefix sums of surplus stay a little above zero. Noise then changes amounts, not directions.

`divided` gives the rows of a microbatch to homes and copies. The flow to a rank is the lack of all ranks from it down.
The runtime plans on the host and divides on the device; the compiler prices with numpy's operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import sqrt
from typing import NamedTuple

from schedc.step.costs.forest import Array, Forest, Operations, most_rows

Held = tuple[tuple[int, ...], ...]
"""[ranks] the experts of which each rank has copies, by number in the layer, in the order of its slots."""

LEAF, MARGIN = 3.0, 2.5
"""Deviations of rows by microbatch: by how many a leaf lacks more than the mean, and by how many parts are widened."""
NEAR = 0.02
"""Share of the mean rows near which prefix sums of a chain stay where noise is less."""
LEAST = 0.002
"""Share of the mean rows from which a copy is worth its bytes."""


def plan_step(rows: Sequence[int], squares: Sequence[int], microbatches: int, slots: int) -> Held:
    """What ranks borrow, a function of facts that all ranks know.

    rows: [E] rows of a step by expert. squares: [R] squares of a home's rows, summed over ``microbatches``. slots: the
    most copies on a rank.
    """
    ranks = len(squares)
    local = len(rows) // ranks
    load = [sum(rows[rank * local : (rank + 1) * local]) / microbatches for rank in range(ranks)]
    mean = sum(load) / ranks
    if not mean:
        return ((),) * ranks
    noise = _noise(load, squares, microbatches)
    tree = _Tree([each - mean for each in load])
    tree.hang_leaves(noise)
    tree.hang_chain(max(noise * sqrt(ranks), NEAR * mean), LEAST * mean)
    held: list[tuple[int, ...]] = [()] * ranks
    for home in range(ranks):
        mine = [rows[home * local + expert] / microbatches for expert in range(local)]
        for child, experts in _borrowed(tree, home, mine, noise, slots):
            held[child] = tuple(home * local + expert for expert in experts)
    return _scarce_first(held)


def plan_step_among(rows: Sequence[int], squares: Sequence[int], microbatches: int, slots: int, peers: int) -> Held:
    """What ranks borrow among ``peers`` neighbours, from arguments of `plan_step` for all ranks."""
    held: list[tuple[int, ...]] = []
    width = len(rows) // len(squares) * peers
    for number, rank in enumerate(range(0, len(squares), peers)):
        first = number * width
        part = plan_step(rows[first : first + width], squares[rank : rank + peers], microbatches, slots)
        held += [tuple(first + expert for expert in experts) for experts in part]
    return tuple(held)


def _noise(load: Sequence[float], squares: Sequence[int], microbatches: int) -> float:
    """The deviation of a rank's rows by microbatch, of all ranks together; for one microbatch that of single rows."""
    if microbatches == 1:
        return sqrt(sum(load) / len(load))
    surplus = (square - microbatches * each * each for square, each in zip(squares, load, strict=True))
    return sqrt(max(0.0, sum(surplus)) / (len(load) * (microbatches - 1)))


class _Tree:
    """Ranks under their parents. net: [R] rows over the mean of a rank and all below it. size: [R] their number."""

    def __init__(self, net: list[float]) -> None:
        self.net, self.size = net, [1] * len(net)
        self.parent = list(range(len(net)))
        self.roots = set(self.parent)

    def hang(self, child: int, parent: int) -> None:
        self.parent[child] = parent
        self.net[parent] += self.net[child]
        self.size[parent] += self.size[child]
        self.roots.remove(child)

    def hang_leaves(self, noise: float) -> None:
        """Hang the emptiest rank under the fullest, as long as noise cannot turn its flow."""
        while len(self.roots) > 1:
            child = min(self.roots, key=lambda rank: (self.net[rank], rank))
            if -self.net[child] <= LEAF * noise * sqrt(self.size[child]):
                return
            self.hang(child, max(self.roots, key=lambda rank: (self.net[rank], -rank)))

    def hang_chain(self, near: float, least: float) -> None:
        """Hang the others in a chain whose prefix sums stay near ``near``. Flows below ``least`` are left out."""
        order: list[int] = []
        before, left = 0.0, set(self.roots)
        while left:
            rank = min(left, key=lambda rank: (abs(before + self.net[rank] - near), rank))
            before += self.net[rank]
            order.append(rank)
            left.remove(rank)
        for parent, child in reversed(list(pairwise(order))):
            if -self.net[child] >= least:
                self.hang(child, parent)


def _borrowed(tree: _Tree, home: int, rows: Sequence[float], noise: float, slots: int) -> list[tuple[int, list[int]]]:
    """By child of ``home`` the experts that it borrows. rows: [m] of the home's experts, in a microbatch."""
    children = [rank for rank, parent in enumerate(tree.parent) if parent == home != rank]
    children.sort(key=lambda rank: (tree.net[rank], rank))
    order = sorted(range(len(rows)), key=lambda expert: (-rows[expert], expert))
    ends = list(accumulate(rows[expert] for expert in order))
    line = [(expert, end - rows[expert], end) for expert, end in zip(order, ends, strict=True)]
    borrowed, begin = [], 0.0
    for child in children:
        end = begin - tree.net[child]
        wider = MARGIN * noise * sqrt(tree.size[child])
        touched = [
            (min(end, last) - max(begin, first), min(end + wider, last) - max(begin - wider, first), -place, expert)
            for place, (expert, first, last) in enumerate(line)
        ]
        best = sorted((each for each in touched if each[1] > 0), key=lambda each: (-max(0.0, each[0]), *_down(each)))
        borrowed.append((child, sorted(each[3] for each in best[:slots])))
        begin = end
    return borrowed


def _down(touched: tuple[float, float, int, int]) -> tuple[float, int]:
    return -touched[1], -touched[2]


def _scarce_first(held: Sequence[Sequence[int]]) -> Held:
    """The same copies, on each rank those first that the fewest ranks have."""
    takers: dict[int, int] = {}
    for experts in held:
        for expert in experts:
            takers[expert] = takers.get(expert, 0) + 1
    return tuple(tuple(sorted(experts, key=lambda expert: (takers[expert], expert))) for experts in held)


class QuotaTables(NamedTuple):
    """How copies of a step divide the rows of microbatches.

    parent: [R] as of a `Forest`. below: [R, R] 1 where a rank is another, or below it; 0 for roots.
    borrowed: [R, slots] experts by slot; E for an empty one. peers: the neighbours among which rows move.
    """

    parent: Array
    below: Array
    borrowed: Array
    peers: int


def quotas_of(held: Held, local: int, peers: int | None = None) -> QuotaTables:
    """The quotas for copies that ranks have, as lists. local: experts of a rank. peers: None for all ranks."""
    ranks, slots = len(held), max(map(len, held))
    parent = [experts[0] // local if experts else rank for rank, experts in enumerate(held)]
    below = [[0] * ranks for _ in held]
    for rank in range(ranks):
        above = rank
        while parent[above] != above:
            below[above][rank] = 1
            above = parent[above]
    borrowed = [[*experts, *[ranks * local] * (slots - len(experts))] for experts in held]
    return QuotaTables(parent, below, borrowed, peers or ranks)


def divided(ops: Operations, rows: Array, quotas: QuotaTables) -> tuple[Forest, Array]:
    """(plan of microbatches, [..., R] rows that were to come to each rank, and for which it has no copy).

    rows: [..., R, m] int64 by home and expert. quotas: arrays.

    A rank takes what it and the ranks below it lack, of its copies in their order; of an expert, lower ranks first.
    """
    ranks, local = rows.shape[-2:]
    load = rows.sum(-1)
    inside = load.reshape(*load.shape[:-1], -1, quotas.peers)
    lacking = most_rows(ops, inside, Fraction(1)).reshape(load.shape) - load
    lack = ops.positive((quotas.below * lacking[..., None, :]).sum(-1))
    left = rows.reshape(*rows.shape[:-2], 1, ranks * local)
    lends = quotas.borrowed[..., None] == ops.numbers(ranks * local, rows)  # [R, slots, E]
    quota = left * 0
    for slot in range(lends.shape[1]):
        wanted = lends[:, slot] * ops.minimum(lack[..., None], left)
        given = ops.minimum(wanted, ops.positive(left - wanted.cumsum(-2) + wanted))
        quota, left, lack = quota + given, left - given.sum(-2)[..., None, :], lack - given.sum(-1)
    quota = quota.reshape(*rows.shape[:-2], ranks, ranks, local).sum(-2)
    return Forest(ops.spread(quotas.parent, load), quota.sum(-1), quota), lack
