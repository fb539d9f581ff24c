"""A bound of a pipeline's seconds for many plans of one placement: no order, and no exact price, is below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.price.part_table import LEVELS
from schedc.planner.search.lanes import LaneSeconds
from schedc.planner.search.placed_counts import PlacedCounts

_HALVINGS = 24


class OrderFacts(NamedTuple):
    """What the bound knows of orders.

    splits: whether weight gradients may come last. overlaps: whether exchanges run beside compute.
    """

    splits: bool
    overlaps: bool


def bound_of_counts(
    counts: PlacedCounts,
    lanes: Sequence[LaneSeconds],
    levels: Sequence[tuple[str, str]],
    microbatches: Floats,
    p2p: Floats,
    facts: OrderFacts,
) -> Floats:
    """[rows, levels] seconds of a pipeline whose stages hold ``counts``.

    A rank cannot start before a forward of all stages before its first one. Then it does all of its work. Behind its
    last backward of its first stage the backwards of the stages before that one must come. If weight gradients can be
    late, only input gradients must. lanes: those of a rank, each of which must do its work. microbatches, p2p: [rows].
    """
    per_lane = [_LaneTerms(counts, lane) for lane in lanes]
    head = np.maximum.reduce([lane.head for lane in per_lane]) + p2p[:, None] * counts.hops
    result = np.empty((microbatches.size, len(levels)))
    many = microbatches[:, None]
    for column, (level, where) in enumerate(levels):
        mask, number = counts.applies(where), [str(each) for each in LEVELS].index(level)
        again = [lane.again(number, mask) for lane in per_lane]
        tail = np.maximum.reduce([lane.tail + before for lane, (_, before) in zip(per_lane, again, strict=True)])
        tail = tail + p2p[:, None] * counts.hops
        best = np.zeros(microbatches.size)
        for lane, (own, _) in zip(per_lane, again, strict=True):
            work = lane.work + own
            if facts.splits or facts.overlaps:
                late = np.maximum(many * work, many * (work - lane.weight) + tail)
            else:
                late = many * work + tail + lane.tail_weight
            best = np.maximum(best, (head + late).max(axis=1))
        result[:, column] = best
    return result


class _LaneTerms:
    """[rows, P] seconds of a lane: a microbatch's work on a rank, and what comes before and behind it."""

    def __init__(self, counts: PlacedCounts, lane: LaneSeconds) -> None:
        self.counts, self.lane = counts, lane
        forward, input, weight = (
            time @ counts.of_stage.T + op[:, None]
            for time, op in zip((lane.forward, lane.input, lane.weight), lane.op.T, strict=True)
        )
        on, before = counts.on_rank.T, counts.before.T
        self.work = (forward + input + weight) @ on
        self.weight = weight @ on
        self.head = forward @ before
        self.tail = input @ before
        self.tail_weight = weight @ before

    def again(self, level: int, mask: Floats) -> tuple[Floats, Floats]:
        """What recomputation adds to the work of a rank, and to the backwards of the stages before its first one."""
        stages = (self.lane.again[:, level] @ self.counts.of_stage.T) * mask
        return stages @ self.counts.on_rank.T, stages @ self.counts.before.T


def bound_of_totals(
    counts: PlacedCounts,
    lanes: Sequence[LaneSeconds],
    levels: Sequence[tuple[str, str]],
    microbatches: Floats,
    facts: OrderFacts,
) -> Floats:
    """[rows, levels] seconds of a pipeline for any layout of the same parts on the same stages.

    The ranks share all work. With a stage per rank, rank r waits for forwards of the ranks before it, and they for its
    backwards: at best the work of ranks falls geometrically. Recomputation of some stages may be of empty ones.
    """
    ranks, total = counts.ranks, counts.of_stage.sum(axis=0)
    stages = counts.of_stage.shape[0]
    result = np.zeros((microbatches.size, len(levels)))
    names = [str(each) for each in LEVELS]
    for lane in lanes:
        each = lane.forward + lane.input + lane.weight
        plain = each @ total + stages * lane.op.sum(axis=1)
        for column, (level, where) in enumerate(levels):
            again = lane.again[:, names.index(level)] if where == "all" else np.zeros_like(each)
            work = plain + again @ total
            spread = work * microbatches / ranks
            if counts.linear:
                spread = np.maximum(spread, _geometric(work, each + again, lane, microbatches, counts, facts))
                chain = (lane.forward + lane.input + again) @ total + stages * (lane.op[:, 0] + lane.op[:, 1])
                spread = np.maximum(spread, _falling(chain, np.ones_like(chain), microbatches, ranks))
            fullest = fullest_rank(each + again, lane.op.sum(axis=1), counts)
            result[:, column] = np.maximum.reduce([result[:, column], spread, fullest * microbatches])
    return result


def fullest_rank(parts: Floats, op: Floats, counts: PlacedCounts) -> Floats:
    """[rows] seconds of one microbatch on the fullest rank, at least: parts are whole, and heads take a layer's place.

    parts: [rows, kinds]; op: [rows] what both ops of a stage take on top. The largest time at which all layers of the
    most frequent kind do not fit beside head and prediction on the ranks, found by halving; nothing else takes room.
    """
    total = counts.of_stage.sum(axis=0)
    layer = int(np.argmax(total))
    own = op * (counts.of_stage.shape[0] / counts.ranks)
    low: Floats = np.add((parts * (total > 0)).max(axis=1), own)
    if not (parts[:, layer] > 0).all():
        return low
    high = np.maximum(low, parts @ total + own * counts.ranks)
    ends = [parts[:, kind] for kind in np.flatnonzero(total == 1) if kind != layer]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _room(middle - own, parts[:, layer], ends, counts.ranks) >= total[layer]
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return low


def _room(seconds: Floats, layer: Floats, ends: Sequence[Floats], ranks: int) -> Floats:
    """[rows] layers that ranks can compute in so many seconds, beside at most two of the other parts, as it suits."""

    def beside(*parts: Floats) -> Floats:
        left = (seconds - np.sum(parts, axis=0)) / layer if parts else seconds / layer
        return np.asarray(np.floor(np.maximum(left * (1 + 1e-12), 0.0)), np.float64)

    largest = sorted(ends, key=lambda part: float(part.max()))[-2:]
    free = beside()
    whole: Floats = np.multiply(ranks, free)
    if not largest:
        return whole
    together: Floats = beside(*largest) + np.multiply(ranks - 1, free)
    if ranks < len(largest):
        return together
    apart = np.sum([beside(part) for part in largest], axis=0) + (ranks - len(largest)) * free
    return np.asarray(np.maximum(apart, together))


def _geometric(
    work: Floats, parts: Floats, lane: LaneSeconds, microbatches: Floats, counts: PlacedCounts, facts: OrderFacts
) -> Floats:
    """[rows] the least T with T >= M w(r) + share x (w(0) + ... + w(r - 1)) on every rank, where w sums to ``work``."""
    share = np.ones(microbatches.size)
    if facts.splits or facts.overlaps:
        there = counts.of_stage.sum(axis=0) > 0
        ratio = np.divide(lane.forward, parts, out=np.ones_like(parts), where=parts > 0)
        op = lane.op.sum(axis=1)
        of_op = np.divide(lane.op[:, 0], op, out=np.ones_like(share), where=op > 0)
        share = np.minimum(np.min(ratio[:, there], axis=1, initial=1.0), of_op)
    return _falling(work, share, microbatches, counts.ranks)


def _falling(work: Floats, share: Floats, microbatches: Floats, ranks: int) -> Floats:
    """[rows] the least T of `_geometric`. work, share: [rows]."""
    late = np.minimum(share / microbatches, 1.0 - 1e-12)
    rest = -np.expm1(ranks * np.log1p(-late))
    least: Floats = np.divide(share * work, rest, out=np.zeros_like(work), where=late > 1e-9)
    return least
