"""Chooses hot experts from counts of rows: for a microbatch by bytes, for a step by time.

Both searches are greedy: lend the most chosen expert of the fullest rank, as long as ranks are out of balance. The best
beginning of the sequence is lent. The runtime lends by them, and `schedc check` prices records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.ir.arrays import Int64

MARGIN = 0.05
"""Relative distance between the imbalance at which hot experts turn on and the lower one at which they turn off. For a
step also the share of the mean rows by which the fullest rank must shrink: less is noise."""


@dataclass(frozen=True)
class HotTimes:
    """What lending for a step brings and takes, in one unit. By default that unit is the bytes of a row, and only what
    travels counts.

    row: a row that leaves the fullest rank: its way there and back, in forward and backward, and the expert's work.
    mean_row: the same over the mean rows of a microbatch: how much of it is known only with that mean.
    copy: an expert's weights to all ranks, and the sum of its gradients back. mean_copy: likewise. idle: time of a
    microbatch in which no rows travel, beside which copies do.
    """

    row: float = 4.0
    mean_row: float = 0.0
    copy: float = 0.0
    mean_copy: float = 0.0
    idle: float = 0.0

    @staticmethod
    def of(costs: CellCosts | None, width: int, item: int, ranks: int) -> HotTimes:
        """From times of segments and exchanges of a microbatch in which all ranks have the mean rows; else from bytes.

        width: columns of an expert. item: bytes of a number in its weights. Gradients travel in float32 at least.
        """
        rows = 3 * width * (item + max(item, 4)) / item  # an expert's weights and gradients, in rows of as many bytes
        times = {} if costs is None else times_by_role(costs)
        experts, dispatch = sum(times.get("experts", ())), times.get("dispatch", SegmentTimes(0.0)).forward
        if not experts or not dispatch:
            return HotTimes(copy=rows)
        move = dispatch * ranks / (ranks - 1)
        compute = sum(map(sum, (times.get(role, ()) for role in ("attention", "shared", "experts", "post"))))
        return HotTimes(0.0, experts + 4 * move, 0.0, rows * move, max(0.0, compute - 4 * dispatch))

    def gain(self, rows: float, copies: int, mean: float, microbatches: int) -> float:
        """What a step gains: the fullest rank has ``rows`` fewer, and ``copies`` experts travel.

        mean: rows of a rank and microbatch.
        """
        saved = rows * (self.row + self.mean_row / mean)
        return saved - max(0.0, copies * (self.copy + self.mean_copy / mean) - microbatches * self.idle)


def times_by_role(costs: CellCosts) -> dict[str, SegmentTimes]:
    """The first times of each role; of an exchange those of all its lanes together."""
    times: dict[str, SegmentTimes] = {}
    for name, each in costs.segments:
        times.setdefault(name, each)
    for name, each in costs.exchanges:
        role, lane = name.rsplit(".", 1) if "." in name else (name, "")
        if lane in ("rail", "node") and not role[0].isdecimal():
            before = times.get(role, SegmentTimes(0.0))
            times[role] = SegmentTimes(*(left + right for left, right in zip(before, each, strict=True)))
    return times


@dataclass(frozen=True)
class HotRule:
    """When experts are lent, with all numbers set.

    most: largest number at a time. below: lend none if the fullest rank has less than ``below`` times the mean number
    of rows; None: whatever the balance. pays_from: rows of an expert that each other rank must keep, on average, by
    microbatch. times: what a copy for a step brings and takes.
    """

    most: int
    below: float | None
    pays_from: int
    times: HotTimes

    def balanced(self, load: Int64, on: bool) -> bool:
        """Whether no expert is hot, since ``load`` [ranks] rows are even enough. on: whether any were hot before."""
        fullest, rows = int(load.max()), int(load.sum())
        threshold = 0.0 if self.below is None else self.below * (1 if on else 1 + MARGIN)
        return not rows or fullest * len(load) < rows * threshold


@dataclass(frozen=True)
class _Candidate:
    """An expert that is lent after earlier candidates. leaving: rows that other ranks keep. before, after: rows of the
    fullest rank without and with it."""

    expert: int
    leaving: int
    before: int
    after: int


def _candidates(rows: Int64) -> Iterator[_Candidate]:
    """The most chosen expert of the fullest rank, the first of equals, again and again. rows: [ranks, experts]."""
    ranks, experts = rows.shape
    total = rows.sum(0)
    own = total.reshape(ranks, -1).copy()
    load = own.sum(1)
    for _ in range(experts):
        fullest = int(load.argmax())
        position = int(own[fullest].argmax())
        if int(own[fullest, position]) < 0:
            return
        expert = fullest * (experts // ranks) + position
        before, own[fullest, position] = int(load[fullest]), -1
        load = load + rows[:, expert]
        load[fullest] -= total[expert]
        yield _Candidate(expert, int(total[expert] - rows[fullest, expert]), before, int(load.max()))


def hot_of_microbatch(rows: Int64, rule: HotRule, on: bool = True) -> tuple[int, ...]:
    """The hot experts of a microbatch, ascending: a function of facts that all ranks know.

    rows: [ranks, experts] whole numbers, by source rank. on: whether any were hot in the
    step before, which makes the threshold `MARGIN` lower.

    Experts are lent as long as ranks are out of balance and bytes are saved. The result leaves the fullest rank with
    the fewest rows; it may be empty.
    """
    load = rows.sum(0).reshape(len(rows), -1).sum(1)
    if rule.balanced(load, on):
        return ()
    mean = int(load.sum()) / len(rows)
    hot: list[int] = []
    best, least = 0, int(load.max())
    for number, candidate in zip(range(rule.most), _candidates(rows), strict=False):
        if not candidate.leaving or candidate.leaving < rule.pays_from * (len(rows) - 1):
            break
        if rule.below is not None and candidate.before < mean * rule.below:
            break
        hot.append(candidate.expert)
        if candidate.after <= least:
            best, least = number + 1, candidate.after
    return tuple(sorted(hot[:best]))


def hot_of_step(rows: Int64, rule: HotRule, microbatches: int, on: bool = True) -> tuple[int, ...]:
    """The hot experts of a step, ascending, from the rows of the step before: a function of facts that all ranks know.

    rows: [ranks, experts] whole numbers, by source rank, of all ``microbatches`` together. on: as of
    `hot_of_microbatch`. The result has the largest `HotTimes.gain`; it may be empty.
    """
    load = rows.sum(0).reshape(len(rows), -1).sum(1)
    if rule.balanced(load, on):
        return ()
    fullest, mean = int(load.max()), int(load.sum()) / len(rows)
    hot: list[int] = []
    best, most_gained = 0, 0.0
    for number, candidate in zip(range(rule.most), _candidates(rows), strict=False):
        if rule.below is not None and candidate.before < mean * rule.below:
            break
        hot.append(candidate.expert)
        left = fullest - candidate.after
        gain = rule.times.gain(left, number + 1, mean / max(1, microbatches), microbatches)
        if left >= MARGIN * mean and gain > most_gained:
            best, most_gained = number + 1, gain
    return tuple(sorted(hot[:best]))


def rows_beside_hot(rows: Int64, hot: tuple[int, ...]) -> Int64:
    """[..., ranks] rows that ranks compute beside slots for ``hot``. rows: [..., ranks, experts] by source rank."""
    ranks = rows.shape[-2]
    lent = np.zeros(rows.shape[-1], bool)
    lent[list(hot)] = True
    home = np.where(lent, 0, rows.sum(-2)).reshape(*rows.shape[:-2], ranks, -1).sum(-1)
    return np.asarray(home + np.where(lent, rows, 0).sum(-1))
