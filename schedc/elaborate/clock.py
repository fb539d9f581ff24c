"""Keeps time while ranks run ops: how long each op takes, when its outputs arrive, and at which ranks."""

from __future__ import annotations

from math import inf

import numpy as np

from schedc.cost.op_times import OpTimes
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.schedule import Schedule

CellRows = tuple[int, ...]
"""The row of an op in the schedule, or the two rows of a pair."""


class RankClock:
    """Times of one run of a schedule, all in the time unit of the costs.

    times: durations of ops and pairs.
    forward: [stages * microbatches] when the output of a forward reaches the next stage; inf before it has started.
    backward: [stages * microbatches] when the input gradient reaches the previous stage; inf before it has started.
    split: [stages * microbatches] whether the backward has run as an I.
    sent: after `start`, the arrivals at other ranks that it caused: (time, rank).
    """

    def __init__(self, schedule: Schedule, times: OpTimes) -> None:
        self.schedule = schedule
        self.kind: list[int] = schedule.kind.tolist()
        self.stage: list[int] = schedule.stage.tolist()
        self.microbatch: list[int] = schedule.microbatch.tolist()
        self.times = times
        self.last, self.count = schedule.stages - 1, schedule.microbatches
        pipe = schedule.placement.pipe_of_microbatch(np.arange(self.count, dtype=np.int32)).tolist()
        self.holder = [schedule.placement.rank_of_stage.tolist()[p] for p in pipe]
        self.forward = [inf] * (schedule.stages * self.count)
        self.backward = [inf] * (schedule.stages * self.count)
        self.split = [False] * (schedule.stages * self.count)
        self.pair_times: dict[tuple[str, int, int], float] = {}
        self.sent: list[tuple[float, int]] = []

    def ready(self, row: int, now: float) -> bool:
        """Whether all inputs of an op have arrived at time ``now``."""
        return self.arrival(row) <= now

    def arrival(self, row: int) -> float:
        """The time at which all inputs of an op have arrived; inf if one of them is not yet being computed."""
        kind, stage = self.kind[row], self.stage[row]
        slot = stage * self.count + self.microbatch[row]
        if kind == OpKind.F:
            return 0.0 if stage == 0 else self.forward[slot - self.count]
        if kind == OpKind.W:
            return 0.0 if self.split[slot] else inf
        if self.forward[slot] == inf:
            return inf
        return 0.0 if stage == self.last or kind == OpKind.R else self.backward[slot + self.count]

    def start(self, cell: CellRows, rank: int, now: float) -> float:
        """Start an op or a pair on ``rank`` at time ``now``: record its outputs and ``sent``; return when it ends."""
        kinds, stages = [self.kind[row] for row in cell], [self.stage[row] for row in cell]
        time = self.times.alone[kinds[0]][stages[0]]
        if len(cell) == 2:
            time = self._pair(LETTERS[kinds[0]] + LETTERS[kinds[1]], stages[0], stages[1])
        end = now + time
        self.sent = []
        for row, kind, stage in zip(cell, kinds, stages, strict=True):
            slot = stage * self.count + self.microbatch[row]
            self.split[slot] |= kind == OpKind.I
            if kind in (OpKind.W, OpKind.R):
                continue
            table, taker = (self.forward, stage + 1) if kind == OpKind.F else (self.backward, stage - 1)
            to = self.holder[self.microbatch[row]][taker] if 0 <= taker <= self.last else rank
            table[slot] = end + self.times.p2p * (to != rank)
            if to != rank:
                self.sent.append((table[slot], to))
        return end

    def _pair(self, kind: str, first: int, second: int) -> float:
        """Duration of a pair of a kind, ``FB``, on these stages; computed the first time only."""
        key = kind, first, second
        if key not in self.pair_times:
            self.pair_times[key] = self.times.pair(kind, first, second)
        return self.pair_times[key]
