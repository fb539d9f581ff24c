"""A bound of a pipeline's seconds for many plans of one placement: no order, and no exact price, is below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.price.part_table import LEVELS
from schedc.planner.search.lanes import LaneSeconds
from schedc.planner.search.placed_counts import PlacedCounts


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
    late, only input gradients must. Inside cells those stages recompute before their gradients arrive. lanes: those of
    a rank, each of which must do its work. microbatches, p2p: [rows].
    """
    per_lane = [_LaneTerms(counts, lane) for lane in lanes]
    head = np.maximum.reduce([lane.head for lane in per_lane]) + p2p[:, None] * counts.hops
    result = np.empty((microbatches.size, len(levels)))
    many = microbatches[:, None]
    for column, (level, where) in enumerate(levels):
        mask, number = counts.applies(where), [str(each) for each in LEVELS].index(level)
        again = [lane.again(number, mask) for lane in per_lane]
        before = [0.0 if facts.overlaps else repeated for _, repeated in again]
        tail = np.maximum.reduce([lane.tail + repeated for lane, repeated in zip(per_lane, before, strict=True)])
        tail = tail + p2p[:, None] * counts.hops
        best = np.zeros(microbatches.size)
        for lane, (own, _) in zip(per_lane, again, strict=True):
            work = lane.work + own
            if facts.splits:
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
