"""`search` runs the heuristic of the zero-bubble paper with every setting of its three switches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np

from schedc.elaborate.numbering import occurrences_before
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.step.choose import ChosenOrder
from schedc.step.op_times import OpTimes
from schedc.step.rules import Searched

WAYS = 8
"""Number of orders that are tried: one per setting of the switches."""

_F, _I, _W = (int(kind) for kind in (OpKind.F, OpKind.I, OpKind.W))


@dataclass(frozen=True)
class Switches:
    """The decisions that the heuristic leaves open.

    fit: during warmup a rank adds a forward only if it does not delay the rank's first I. Otherwise it adds forwards
        as long as it is idle.
    skip: a rank that is two forwards ahead of the next rank may leave one out, if the largest bubble does not grow.
    fill: a rank fills a gap with a W that is longer than the gap, even if its bubble would stay below the largest.
    """

    fit: bool
    skip: bool
    fill: bool


SETTINGS = tuple(Switches(*flags) for flags in product((True, False), repeat=3))
"""All settings, in the order in which they are tried. The first of equally good ones is taken."""


def searchable(schedule: Schedule) -> bool:
    """Whether rank r holds stage r only, and runs exactly F, I and W of every microbatch, without pairs."""
    ranks, count = schedule.ranks, schedule.microbatches
    placement = schedule.placement
    if placement.pipes > 1 or not np.array_equal(placement.rank_of_stage[0], np.arange(ranks)):
        return False
    ids = (schedule.stage.astype(np.int64) * count + schedule.microbatch) * len(OpKind) + schedule.kind
    expected = (np.arange(ranks * count)[:, None] * len(OpKind) + [_F, _I, _W]).ravel()
    return np.array_equal(np.sort(ids), np.sort(expected)) and not (schedule.pair >= 0).any()


def search_zero_bubble(schedule: Schedule, rule: Searched, times: OpTimes) -> ChosenOrder:
    """The order of least span that the heuristic finds for a `searchable` schedule.

    Incomplete, without any op, if no setting finds an order within the memory of ``rule``.
    Source: Qi et al., arXiv 2401.10241, section 3.1, as in the authors' implementation (zb.py).
    """
    attempts = [_Ranks(schedule.microbatches, times, rule) for _ in SETTINGS]
    complete = [ranks for ranks, switches in zip(attempts, SETTINGS, strict=True) if ranks.run(switches)]
    if not complete:
        return ChosenOrder.of_cells([])
    best = min(complete, key=lambda ranks: ranks.span)
    rows = np.zeros((len(OpKind), schedule.stages, schedule.microbatches), np.int64)
    rows[schedule.kind, schedule.stage, schedule.microbatch] = np.arange(len(schedule))
    kinds = [np.array(order) for order in best.order]
    ordered = [rows[kind, rank, occurrences_before(kind)] for rank, kind in enumerate(kinds)]
    return ChosenOrder(np.concatenate(ordered), np.zeros(len(schedule), bool))


class _Ranks:
    """The state of all ranks while one order is built. Each rank has its own clock.

    times: by kind, [ranks][microbatches] duration of an op. order: [ranks] kinds of the ops so far.
    done: by kind, [ranks] ops so far. ends: by kind F and I, [ranks][ops] end of each.
    free: [ranks] end of the last op. first: [ranks] start of the first op. bubble: [ranks] idle time since then.
    largest: largest bubble so far.
    takes: by kind, memory that an op takes; held, most: [ranks] memory in use and limit, in units of the rule.
    """

    def __init__(self, microbatches: int, times: OpTimes, rule: Searched) -> None:
        self.count, self.p2p = microbatches, times.p2p
        self.every = range(len(times.alone[_F]))
        self.last = len(self.every) - 1
        factors = np.ones((1, microbatches)) if times.factors is None else times.factors
        self.times = {kind: (np.array(times.alone[kind])[:, None] * factors).tolist() for kind in (_F, _I, _W)}
        self.takes = {_F: rule.whole, _I: rule.kept - rule.whole, _W: -rule.kept}
        self.most = [most * rule.whole for most in rule.most]
        self.order: list[list[int]] = [[] for _ in self.every]
        self.done = {kind: [0] * len(self.every) for kind in (_F, _I, _W)}
        self.ends: dict[int, list[list[float]]] = {kind: [[] for _ in self.every] for kind in (_F, _I)}
        self.free, self.first = [0.0] * len(self.every), [0.0] * len(self.every)
        self.bubble, self.largest = [0.0] * len(self.every), 0.0
        self.held = [0] * len(self.every)

    @property
    def span(self) -> float:
        """Longest time from a rank's first op to the end of its last."""
        return max(free - first for free, first in zip(self.free, self.first, strict=True))

    def run(self, switches: Switches) -> bool:
        """Build the whole order; False if it does not fit into memory."""
        if min(most - self.takes[_F] for most in self.most) < 0:
            return False
        self._warmup(switches.fit)
        for microbatch in range(1, self.count):
            ahead = self._ahead(switches.skip)
            for rank in self.every:
                if ahead[rank] and not self._forward(rank, switches.fill):
                    return False
            for rank in reversed(self.every):
                self._fill(rank, _I, switches.fill)
                if rank == 0 and self.done[_F][0] == self.count:
                    self._weights(0, microbatch)
                self._put(rank, _I)
        for rank in self.every:
            self._weights(rank, self.count)
        return True

    def _put(self, rank: int, kind: int) -> None:
        """Append the next op of this kind to the order of a rank."""
        free = self.free[rank]
        start = max(free, self._arrival(rank, kind)) if kind != _W else free
        if not self.order[rank]:
            self.first[rank] = start
        else:
            self.bubble[rank] += start - free
            self.largest = max(self.largest, self.bubble[rank])
        self.free[rank] = start + self._time(kind, rank)
        self.held[rank] += self.takes[kind]
        self.done[kind][rank] += 1
        self.order[rank].append(kind)
        if kind != _W:
            self.ends[kind][rank].append(self.free[rank])

    def _time(self, kind: int, rank: int, ahead: int = 0) -> float:
        """Duration of the op of this kind that is ``ahead`` of the next one of a rank; of the last where none is."""
        times = self.times[kind][rank]
        return times[min(self.done[kind][rank] + ahead, len(times) - 1)]  # type: ignore[no-any-return]

    def _arrival(self, rank: int, kind: int) -> float:
        """When the input of the rank's next op of this kind arrives; -inf if it comes from no other rank."""
        sender = rank - 1 if kind == _F else rank + 1
        if not 0 <= sender <= self.last:
            return -inf
        return self.ends[kind][sender][self.done[kind][rank]] + self.p2p

    def _pending(self, rank: int) -> bool:
        """Whether a weight gradient of the rank is pending."""
        return self.done[_W][rank] < self.done[_I][rank]

    def _weights(self, rank: int, until: int) -> None:
        """Append W until the rank has run ``until`` of them."""
        while self.done[_W][rank] < until:
            self._put(rank, _W)

    # ---- what runs when

    def _warmup(self, fit: bool) -> None:
        """Append to every rank one forward, more forwards that fit before its first I, and this I."""
        for rank in self.every:
            self._put(rank, _F)
        extra = self._before_first(fit)
        for rank in self.every[1:]:  # a rank is at least one forward ahead of the next, until it has run them all
            if extra[rank] >= extra[rank - 1] and 1 + extra[rank - 1] < self.count:
                extra[rank] = max(0, extra[rank - 1] - 1)
        for rank in self.every:
            for _ in range(extra[rank]):
                self._put(rank, _F)
        for rank in reversed(self.every):
            self._put(rank, _I)

    def _before_first(self, fit: bool) -> list[int]:
        """[ranks] how many more forwards each rank has time and memory for until its first I can start."""
        extra = [0] * len(self.every)
        ended = self.free[self.last] + self._time(_I, self.last)
        for rank in reversed(self.every[:-1]):
            arrival, free = ended + self.p2p, self.free[rank]
            room = min((self.most[rank] - self.held[rank]) // self.takes[_F], self.count - 1)
            while extra[rank] < room:
                forward = self._time(_F, rank, extra[rank])
                if not (free + forward <= arrival if fit else free < arrival):
                    break
                free += forward
                extra[rank] += 1
            ended = max(free, arrival) + self._time(_I, rank)
        return extra

    def _ahead(self, skip: bool) -> list[bool]:
        """[ranks] whether a rank runs a forward before its next I. It does so only if the next rank does."""
        runs = [
            self.done[_F][rank] < self.count and not (skip and rank < self.last and self._skips(rank))
            for rank in self.every
        ]
        for rank in reversed(self.every[:-1]):
            runs[rank] = runs[rank] and runs[rank + 1]
        return runs

    def _skips(self, rank: int) -> bool:
        """Whether a rank leaves out a forward: it is two ahead, and its I can run first without a larger bubble."""
        if self.done[_F][rank] < self.done[_F][rank + 1] + 2:
            return False
        following = self.free[rank + 1] + self._time(_F, rank + 1) + self._time(_I, rank + 1) + self.p2p
        if self.free[rank] >= following:
            return True
        over = max(0, self.held[rank] + self.takes[_F] - self.most[rank])
        weights = min(-(over // self.takes[_W]), self.done[_I][rank] - self.done[_W][rank])
        if self.free[rank] + self._time(_F, rank) + weights * self._time(_W, rank) <= following:
            return False
        return following - self.free[rank] <= self.largest - self.bubble[rank]

    def _forward(self, rank: int, fill: bool) -> bool:
        """Append the W that make room for a forward, and the forward; False if memory does not suffice."""
        while self.held[rank] + self.takes[_F] > self.most[rank]:
            if not self._pending(rank):
                return False
            self._put(rank, _W)
        self._fill(rank, _F, fill)
        self._put(rank, _F)
        return True

    def _fill(self, rank: int, kind: int, fill: bool) -> None:
        """Append W until the input of the next op arrives. One that is longer than the gap depends on the bubbles."""
        arrival = self._arrival(rank, kind)
        while self._pending(rank) and self.free[rank] + self._time(_W, rank) <= arrival:
            self._put(rank, _W)
        if self._pending(rank) and self.free[rank] < arrival:
            gap = arrival - self.free[rank]
            if fill or gap > self.largest - self.bubble[rank]:
                self._put(rank, _W)
