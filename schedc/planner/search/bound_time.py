"""Bounds of the pipelines of many plans of one placement: no order, and no exact price, is below them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.search.lanes import LaneSeconds
from schedc.planner.search.placed_counts import PlacedCounts


class _LaneWork:
    """[rows, stages] seconds that one microbatch keeps a lane busy for, by op."""

    def __init__(self, counts: PlacedCounts, lane: LaneSeconds) -> None:
        self.counts, self.lane = counts, lane
        self.forward, self.input, self.weight = (
            time @ counts.of_stage.T + op[:, None]
            for time, op in zip((lane.forward, lane.input, lane.weight), lane.op.T, strict=True)
        )

    @cached_property
    def of_rank(self) -> Floats:
        """[rows, P] forwards of a rank."""
        return np.asarray(self.forward @ self.counts.on_rank.T)

    def recomputed(self, level: int, applies: Floats) -> Floats:
        """What recomputation adds to backwards. level: by `LEVELS`. applies: [stages] 1 where backwards recompute."""
        return np.asarray((self.lane.recomputed[:, level] @ self.counts.of_stage.T) * applies)


def bound_of_counts(
    counts: PlacedCounts,
    lane: LaneSeconds,
    levels: Sequence[tuple[str, str]],
    microbatches: Floats,
    p2p: Floats,
    splits: bool,
) -> Floats:
    """[rows, levels] seconds of a pipeline whose stages hold ``counts``, where nothing runs beside compute.

    A rank cannot start before a forward of all stages before its first one. Then the rank does all of its work. Behind
    its last backward of its first stage the backwards of the stages before that one must come. If weight gradients can
    be late, only input gradients must. lane: the one of a rank. levels: of recomputation, and where. microbatches, p2p:
    [rows]. splits: whether weight gradients are ops of their own.
    """
    work, on, before = _LaneWork(counts, lane), counts.on_rank.T, counts.before.T
    whole, weight = (work.forward + work.input + work.weight) @ on, work.weight @ on
    hops, many = p2p[:, None] * counts.hops, microbatches[:, None]
    head, behind, last_weight = work.forward @ before + hops, work.input @ before, work.weight @ before
    result = np.empty((microbatches.size, len(levels)))
    for column, level in enumerate(levels):
        more = work.recomputed(*counts.at_level(*level))
        own, tail = whole + more @ on, (behind + more @ before) + hops
        late = np.maximum(many * own, many * (own - weight) + tail) if splits else many * own + tail + last_weight
        result[:, column] = np.maximum(0.0, (head + late).max(axis=1))
    return result


def bound_of_work(
    counts: PlacedCounts, lanes: Sequence[LaneSeconds], levels: Sequence[tuple[str, str]], microbatches: Floats
) -> Floats:
    """[rows, levels] seconds of the busiest lane of the busiest rank, where no rank waits for the others' steps.

    The step is the longest span of a rank then, in which all of its work lies. Arguments as of `bound_of_counts`.
    """
    works, on = [_LaneWork(counts, lane) for lane in lanes], counts.on_rank.T
    result = np.zeros((microbatches.size, len(levels)))
    for column, level in enumerate(levels):
        for work in works:
            whole = work.forward + work.input + work.weight + work.recomputed(*counts.at_level(*level))
            result[:, column] = np.maximum(result[:, column], microbatches * (whole @ on).max(axis=1))
    return result


# Exchanges beside compute. On a rank the cells before its first backward have forwards alone, and those behind its last
# forward backwards alone. A cell of one op takes a chain of tasks, in which exchanges stand behind compute. Only cells
# between may run lanes side by side.


def bound_of_pairs(
    counts: PlacedCounts,
    lanes: Sequence[LaneSeconds],
    chains: tuple[Floats, Floats],
    levels: Sequence[tuple[str, str]],
    microbatches: Floats,
    p2p: Floats,
    splits: bool,
) -> Floats:
    """[rows, levels] seconds of a pipeline whose exchanges run beside compute; no order inside cells is below it.

    lanes: those of a rank. chains: of parts, as `schedc.planner.search.lanes.chain_seconds`. Others as for
    `bound_of_counts`.
    """
    ends = _Ends(counts, chains, p2p)
    works = [_LaneWork(counts, lane) for lane in lanes]
    single = np.maximum.reduce([ends.forward, *(work.forward for work in works)])
    alone = [_Alone.of(counts, single, work.forward) for work in works]
    result = np.empty((microbatches.size, len(levels)))
    for column, level in enumerate(levels):
        of_level = counts.at_level(*level)
        recomputed = [work.recomputed(*of_level) for work in works]
        result[:, column] = _of_level(counts, ends, works, alone, recomputed, microbatches[:, None], splits)
    return result


class _Ends:
    """The chains in front of the work of ranks, and behind it.

    forward, input: [rows, stages] chains of ops. head, tail: [rows, P] before the first forward of a rank can start,
    and from its last input gradient on. warm: [rows, P] from then to the end of its first input gradient. cool:
    [rows, P] from the start of its last forward to its last input gradient.
    """

    def __init__(self, counts: PlacedCounts, chains: tuple[Floats, Floats], p2p: Floats) -> None:
        self.forward, self.input = (time[:, :-1] @ counts.of_stage.T + time[:, -1:] for time in chains)
        near, far = p2p[:, None] * counts.hops, p2p[:, None] * counts.hops_behind
        there = p2p[:, None] * counts.sent
        self.head, self.tail = (time @ counts.before.T + near for time in (self.forward, self.input))
        behind = [time @ counts.behind.T + far for time in (self.forward, self.input)]
        whole = [time.sum(axis=1, keepdims=True) + there for time in (self.forward, self.input)]
        least = [-counts.largest(-time) for time in (self.forward, self.input)]
        self.warm = whole[0] + behind[1] + least[1] - self.head
        self.cool = behind[0] + whole[1] + least[0] - self.tail


class _Alone(NamedTuple):
    """Ops of a rank in cells of their own. All [rows, P] seconds.

    least: time beyond the lane's work where each stage has one such op. share: the largest share of a
    chain in which the lane works. most: the largest work of one.
    """

    least: Floats
    share: Floats
    most: Floats

    @classmethod
    def of(cls, counts: PlacedCounts, chain: Floats, work: Floats) -> _Alone:
        """chain, work: [rows, stages] of an op."""
        share = np.divide(work, chain, out=np.ones_like(chain), where=chain > 0)
        return cls((chain - work) @ counts.on_rank.T, counts.largest(share), counts.largest(work))

    def beyond(self, time: Floats, most: Floats) -> Floats:
        """The ops' time beyond their work if ops fill ``time``, or all ops but one are alone."""
        work = np.clip(time * self.share, 0.0, np.maximum(most - self.most, 0.0))
        rest = np.divide(1.0, self.share, out=np.zeros_like(self.share), where=self.share > 0) - 1.0
        return np.maximum(self.least, work * np.maximum(rest, 0.0))


def _of_level(
    counts: PlacedCounts,
    ends: _Ends,
    works: Sequence[_LaneWork],
    alone: Sequence[_Alone],
    recomputed: Sequence[Floats],
    many: Floats,
    splits: bool,
) -> Floats:
    """[rows] the bound at one level. By lane: works; alone, of forwards; recomputed, [rows, stages] seconds.

    many: [rows, 1] microbatches.
    """
    late = [0.0 if splits else work.weight for work in works]
    backwards = [work.input + more + weight for work, more, weight in zip(works, recomputed, late, strict=True)]
    chain = np.maximum.reduce([ends.input, *backwards])
    trailing = counts.largest(chain - ends.input)
    on, best = counts.on_rank.T, np.zeros(len(many))
    for work, before, backward in zip(works, alone, backwards, strict=True):
        behind = _Alone.of(counts, chain, backward)
        one = before.most + behind.most
        forward, whole = many * work.of_rank, many * (backward @ on)
        warm, cool = before.beyond(ends.warm - one, forward), behind.beyond(ends.cool - one, whole)
        sent = forward + whole + warm + cool - trailing + ends.tail
        rest = many * (work.weight @ on) if splits else cool
        best = np.maximum(best, (ends.head + np.maximum(sent, forward + whole + warm + rest)).max(axis=1))
    return np.asarray(best)
