"""A bound of the pipelines of many plans whose exchanges run beside compute: no order inside cells is below it.

On a rank the cells before its first backward have forwards alone, and those behind its last forward backwards alone. A
cell of one op takes a chain of tasks, in which exchanges stand behind compute. Only between may lanes run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.price.part_table import LEVELS
from schedc.planner.search.lanes import LaneSeconds
from schedc.planner.search.placed_counts import PlacedCounts


def bound_of_pairs(
    counts: PlacedCounts,
    lanes: Sequence[LaneSeconds],
    chains: tuple[Floats, Floats],
    levels: Sequence[tuple[str, str]],
    microbatches: Floats,
    p2p: Floats,
    splits: bool,
) -> Floats:
    """[rows, levels] seconds of a pipeline whose stages hold ``counts``.

    lanes: those of a rank. chains: of parts, as `schedc.planner.search.lanes.chain_seconds`. levels: of recomputation,
    and where. microbatches, p2p: [rows]. splits: whether weight gradients are ops of their own.
    """
    ends = _Ends(counts, chains, p2p)
    works = [_LaneWork(counts, lane) for lane in lanes]
    single = np.maximum.reduce([ends.forward, *(work.forward for work in works)])
    alone = [_Alone.of(counts, single, work.forward) for work in works]
    result = np.empty((microbatches.size, len(levels)))
    for column, (level, where) in enumerate(levels):
        mask, number = counts.applies(where), [str(each) for each in LEVELS].index(level)
        again = [work.again(number, mask) for work in works]
        result[:, column] = _of_level(counts, ends, works, alone, again, microbatches[:, None], splits)
    return result


class _LaneWork:
    """[rows, stages] seconds that one microbatch keeps a lane busy for. of_rank: [rows, P] in forwards."""

    def __init__(self, counts: PlacedCounts, lane: LaneSeconds) -> None:
        self.counts, self.lane = counts, lane
        self.forward, self.input, self.weight = (
            time @ counts.of_stage.T + op[:, None]
            for time, op in zip((lane.forward, lane.input, lane.weight), lane.op.T, strict=True)
        )
        self.of_rank = self.forward @ counts.on_rank.T

    def again(self, level: int, mask: Floats) -> Floats:
        """What recomputation adds to backwards. mask: [stages] where it does."""
        return np.asarray((self.lane.again[:, level] @ self.counts.of_stage.T) * mask)


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
        least = [-_largest(counts, -time) for time in (self.forward, self.input)]
        self.warm = whole[0] + behind[1] + least[1] - self.head
        self.cool = behind[0] + whole[1] + least[0] - self.tail


class _Alone(NamedTuple):
    """Ops of a rank in cells of their own. All [rows, P] seconds.

    least: what they take beyond their work on a lane where each stage has one of them. share: the largest share of a
    chain in which the lane works. most: the largest work of one.
    """

    least: Floats
    share: Floats
    most: Floats

    @classmethod
    def of(cls, counts: PlacedCounts, chain: Floats, work: Floats) -> _Alone:
        """chain, work: [rows, stages] of an op."""
        share = np.divide(work, chain, out=np.ones_like(chain), where=chain > 0)
        return cls((chain - work) @ counts.on_rank.T, _largest(counts, share), _largest(counts, work))

    def beyond(self, time: Floats, most: Floats) -> Floats:
        """What the ops take beyond their work if they fill ``time``, or all but one of them are alone."""
        work = np.clip(time * self.share, 0.0, np.maximum(most - self.most, 0.0))
        rest = np.divide(1.0, self.share, out=np.zeros_like(self.share), where=self.share > 0) - 1.0
        return np.maximum(self.least, work * np.maximum(rest, 0.0))


def _largest(counts: PlacedCounts, of_stages: Floats) -> Floats:
    """[rows, P] the largest value among the stages of a rank."""
    own = counts.placement.stage_of_chunk
    return np.asarray(np.where(own >= 0, of_stages[:, np.maximum(own, 0)], 0.0).max(axis=2))


def _of_level(
    counts: PlacedCounts,
    ends: _Ends,
    works: Sequence[_LaneWork],
    alone: Sequence[_Alone],
    again: Sequence[Floats],
    many: Floats,
    splits: bool,
) -> Floats:
    """[rows] the bound at one level. works, alone: by lane, the latter of forwards; again: [rows, stages] by lane.

    many: [rows, 1] microbatches.
    """
    late = [0.0 if splits else work.weight for work in works]
    backwards = [work.input + more + weight for work, more, weight in zip(works, again, late, strict=True)]
    chain = np.maximum.reduce([ends.input, *backwards])
    trailing = _largest(counts, chain - ends.input)
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
