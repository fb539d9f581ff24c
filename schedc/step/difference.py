"""Two schedules side by side: where their orders part, ops that are missing or elsewhere, and the times of each."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedc.ir.arrays import Int64
from schedc.ir.ops import LETTERS
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.rank_counts import counts
from schedc.step.timeline import simulate

SHOWN = 8
"""Ops that are named in each list; the counts are of all."""


@dataclass(frozen=True)
class RankDifference:
    """How the order of one rank differs.

    index: position from 0 at which the orders part; first: the op there, of either ("" where an order has ended).
    missing: ops that only the first schedule runs on this rank.
    added: ops that only the second schedule runs on this rank.
    moved: ops of both; the fewest that must move to turn one order into the other.
    paired: ops of both that are overlapped with another op, or with none, in the other schedule.
    number: how many ops each list has, in this order; the tuples name at most `SHOWN` of them.
    """

    rank: int
    index: int
    first: tuple[str, str]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    moved: tuple[str, ...]
    paired: tuple[str, ...]
    number: tuple[int, int, int, int]

    def to_json(self) -> dict[str, Any]:
        lists = {"missing": self.missing, "added": self.added, "moved": self.moved, "paired": self.paired}
        return {
            "rank": self.rank,
            "index": self.index,
            "a": self.first[0],
            "b": self.first[1],
            **{name: list(ops) for name, ops in lists.items()},
            "counts": dict(zip(lists, self.number, strict=True)),
        }


@dataclass(frozen=True)
class Figure:
    """One figure of both schedules."""

    name: str
    first: float
    second: float


@dataclass(frozen=True, eq=False)
class Difference:
    """Two schedules under their costs. ``equal``: every rank runs the same cells in the same order."""

    schedules: tuple[Schedule, Schedule]
    ranks: tuple[RankDifference, ...]
    figures: tuple[Figure, ...]

    @property
    def equal(self) -> bool:
        return not self.ranks

    def to_json(self) -> dict[str, Any]:
        return {
            "a": _identity(self.schedules[0]),
            "b": _identity(self.schedules[1]),
            "equal": self.equal,
            "order": [rank.to_json() for rank in self.ranks],
            "figures": {figure.name: [figure.first, figure.second] for figure in self.figures},
        }


def _identity(schedule: Schedule) -> dict[str, Any]:
    return {"schedule": schedule.name, "sizes": dict(schedule.sizes)}


def compare(
    first: Schedule, second: Schedule, costs: Costs | None = None, second_costs: Costs | None = None
) -> Difference:
    """How ``second`` differs from ``first``. Both must be legal; names, phases and source do not count.

    second_costs: costs of ``second``; by default ``costs``.
    Raises `DiagnosticError` (S404) for costs of another number of stages.
    """
    ranks = range(max(first.ranks, second.ranks))
    by_rank = (_rank(rank, _ops(first, rank), _ops(second, rank)) for rank in ranks)
    one, other = _figures(first, costs), _figures(second, second_costs or costs)
    figures = tuple(Figure(name, one[name], other[name]) for name in one)
    return Difference((first, second), tuple(each for each in by_rank if each is not None), figures)


# Orders.


@dataclass(frozen=True, eq=False)
class _Order:
    """One rank's ops as numbers that are equal where kind, stage and microbatch are; partner: that of a pair, or -1."""

    op: Int64
    partner: Int64


_KINDS, _STAGES = len(LETTERS), 1 << 20


def _ops(schedule: Schedule, rank: int) -> _Order:
    if rank >= schedule.ranks:
        nothing = np.zeros(0, np.int64)
        return _Order(nothing, nothing)
    rows = slice(int(schedule.rank_start[rank]), int(schedule.rank_start[rank + 1]))
    stage, microbatch = schedule.stage[rows].astype(np.int64), schedule.microbatch[rows].astype(np.int64)
    op = (microbatch * _STAGES + stage) * _KINDS + schedule.kind[rows]
    pair = schedule.pair[rows]
    partner = np.full(op.size, -1)
    starts = np.flatnonzero((pair[1:] >= 0) & (pair[1:] == pair[:-1]))
    partner[starts], partner[starts + 1] = op[starts + 1], op[starts]
    return _Order(op, partner)


def _name(op: int) -> str:
    rest, kind = divmod(op, _KINDS)
    microbatch, stage = divmod(rest, _STAGES)
    return f"{stage}{LETTERS[kind]}{microbatch}"


def _named(order: _Order, at: int) -> str:
    """The op at a position, with what it is paired with; empty behind the end."""
    if at >= order.op.size:
        return ""
    partner = int(order.partner[at])
    return _name(int(order.op[at])) + (f" & {_name(partner)}" if partner >= 0 else "")


def _rank(rank: int, one: _Order, other: _Order) -> RankDifference | None:
    shared = min(one.op.size, other.op.size)
    unequal = (one.op[:shared] != other.op[:shared]) | (one.partner[:shared] != other.partner[:shared])
    if not unequal.any() and one.op.size == other.op.size:
        return None
    index = int(np.argmax(unequal)) if unequal.any() else shared
    missing = one.op[~np.isin(one.op, other.op)]
    added = other.op[~np.isin(other.op, one.op)]
    # ops of both, in the order of the first, and where the second has them; a legal order has each op once
    common = one.op[np.isin(one.op, other.op)]
    by_op = np.argsort(other.op)
    position = by_op[np.searchsorted(other.op, common, sorter=by_op)]
    moved = common[~_longest_rising(position)]
    paired = common[one.partner[np.isin(one.op, other.op)] != other.partner[position]]
    first = (_named(one, index), _named(other, index))
    named = (_shown(missing), _shown(added), _shown(moved), _shown(paired))
    return RankDifference(rank, index, first, *named, (missing.size, added.size, moved.size, paired.size))


def _shown(ops: Int64) -> tuple[str, ...]:
    return tuple(_name(op) for op in ops[:SHOWN].tolist())


def _longest_rising(values: Int64) -> Any:
    """[n] which values belong to a longest rising subsequence: what need not move (patience sorting)."""
    tops: list[int] = []
    at: list[int] = []
    before = np.full(values.size, -1)
    for i, value in enumerate(values.tolist()):
        pile = bisect_left(tops, value)
        before[i] = at[pile - 1] if pile else -1
        tops[pile : pile + 1], at[pile : pile + 1] = [value], [i]
    kept = np.zeros(values.size, bool)
    i = at[-1] if at else -1
    while i >= 0:
        kept[i] = True
        i = int(before[i])
    return kept


# Figures.


def _figures(schedule: Schedule, costs: Costs | None) -> dict[str, float]:
    """Times in the unit of the costs; peaks are the largest over the ranks."""
    cells = Dependencies.of(schedule)
    timeline, memory = simulate(schedule, costs, cells), measure_memory(schedule, costs, cells)
    numbers = counts(cells)
    return {
        "makespan": timeline.makespan,
        "bubble": float(timeline.bubble.max()),
        "bubble_ratio": timeline.bubble_ratio,
        "span_bubble": float(timeline.span_bubble.max()),
        "span_bubble_ratio": timeline.span_bubble_ratio,
        "peak_activations": int(memory.peak_activations.max()),
        "peak_pending_weight": int(memory.peak_pending_weight.max()),
        "peak_memory": float(memory.peak_memory.max()),
        "messages": int(numbers["messages"][0]),
        "busiest_link": int(numbers["busiest_link"][0]),
    }
