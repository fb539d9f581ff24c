"""Keeps time while ranks run ops: how long each op takes, when its outputs arrive, and at which ranks."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Int64
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.schedule import Schedule
from schedc.step.op_times import OpTimes

CellRows = tuple[int, ...]
"""The row of an op in the schedule, or the two rows of a pair."""


class RankClock:
    """Times of one run of a schedule, all in the time unit of the costs.

    An op needs two values, and sets two. Where it has fewer, one is always there, or nobody reads it.

    times: durations of ops and pairs; time: [ops] that of each op alone.
    there: when each value is there; inf before its op has started. A stage and microbatch have four. Two are
        the output of the forward at the next stage and the input gradient at the previous one. Two mark the forward and
        the I: 0 from the start of the op on.
    needs: [ops] of pairs, places in ``there``. output, mark: [ops] places in it. to: [ops] rank to which the output is
        sent, -1 where it stays.
    sent: after `start`, the arrivals at other ranks that it caused: (time, rank).
    """

    def __init__(self, schedule: Schedule, times: OpTimes) -> None:
        self.schedule = schedule
        self.kind: list[int] = schedule.kind.tolist()
        self.stage: list[int] = schedule.stage.tolist()
        self.microbatch: list[int] = schedule.microbatch.tolist()
        self.times = times
        self.time: list[float] = np.array(times.alone)[schedule.kind, schedule.stage].tolist()
        places = OpValues.of(schedule)
        self.there: list[float] = [inf] * (places.always + 2)
        self.there[places.always] = 0.0
        self.needs: list[tuple[int, int]] = list(zip(places.first.tolist(), places.second.tolist(), strict=True))
        self.output: list[int] = places.output.tolist()
        self.mark: list[int] = places.mark.tolist()
        self.to: list[int] = places.to.tolist()
        self.pair_times: dict[tuple[str, int, int], float] = {}
        self.sent: list[tuple[float, int]] = []

    def ready(self, row: int, now: float) -> bool:
        """Whether all inputs of an op have arrived at time ``now``."""
        first, second = self.needs[row]
        return self.there[first] <= now and self.there[second] <= now

    def arrival(self, row: int) -> float:
        """The time at which all inputs of an op have arrived; inf if one of them is not yet being computed."""
        first, second = self.needs[row]
        return max(self.there[first], self.there[second])

    def start(self, cell: CellRows, now: float) -> float:
        """Start an op or a pair at time ``now``: record its outputs and ``sent``; return when it ends."""
        end = now + (self.time[cell[0]] if len(cell) == 1 else self._pair(*cell))
        self.sent = []
        for row in cell:
            to, arrival = self.to[row], end
            if to >= 0:
                arrival = end + self.times.p2p
                self.sent.append((arrival, to))
            self.there[self.output[row]] = arrival
            self.there[self.mark[row]] = 0.0
        return end

    def _pair(self, first: int, second: int) -> float:
        """Duration of a pair of two rows; computed once for a kind, ``FB``, on two stages."""
        key = LETTERS[self.kind[first]] + LETTERS[self.kind[second]], self.stage[first], self.stage[second]
        if key not in self.pair_times:
            self.pair_times[key] = self.times.pair(*key)
        return self.pair_times[key]


class OpValues(NamedTuple):
    """[ops] places in `RankClock.there` of what an op needs and sets, and the rank that it sends to.

    always: the place of what is always there; the one behind it is that of what nobody reads.
    """

    first: Int64
    second: Int64
    output: Int64
    mark: Int64
    to: Int64
    always: int

    @classmethod
    def of(cls, schedule: Schedule) -> OpValues:
        kind, stage, count = schedule.kind, schedule.stage.astype(np.int64), schedule.microbatches
        slot, size = stage * count + schedule.microbatch, schedule.stages * count
        gradient, started, split, always = size, 2 * size, 3 * size, 4 * size
        forward, backward, last = kind == OpKind.F, BACKWARD[kind], schedule.stages - 1
        taker = np.where(forward, stage + 1, stage - 1)
        holder = schedule.placement.rank_of(np.clip(taker, 0, last).astype(np.int32), schedule.microbatch)
        sends = (forward | backward) & (taker >= 0) & (taker <= last) & (holder != schedule.rank)
        return cls(
            np.select([forward, kind == OpKind.W], [always, split + slot], started + slot),
            np.select(
                [forward & (stage > 0), backward & (stage < last)], [slot - count, gradient + slot + count], always
            ),
            np.select([forward, backward], [slot, gradient + slot], always + 1),
            np.select([forward, kind == OpKind.I], [started + slot, split + slot], always + 1),
            np.where(sends, holder, -1),
            always,
        )
