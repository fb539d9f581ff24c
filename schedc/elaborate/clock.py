"""The ranks' clock: what every op takes, when its outputs arrive, and whom they wake."""

from __future__ import annotations

from math import inf

import numpy as np

from schedc.cost.costs import Costs
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule

CellRows = tuple[int, ...]
"""The row of an op, or the two rows of a pair."""


class RankClock:
    """What has arrived where, and how long things take."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.kind: list[int] = schedule.kind.tolist()
        self.stage: list[int] = schedule.stage.tolist()
        self.microbatch: list[int] = schedule.microbatch.tolist()
        self.costs = costs.resolved(schedule.stages)
        self.time: list[list[float]] = [getattr(self.costs, kind.name).tolist() for kind in OpKind]
        self.last, self.count = schedule.stages - 1, schedule.microbatches
        pipe = schedule.placement.pipe_of_microbatch(np.arange(self.count, dtype=np.int32)).tolist()
        self.holder = [schedule.placement.rank_of_stage.tolist()[p] for p in pipe]
        # of every stage and microbatch: when its output reaches the stage after, its gradient the stage before
        self.forward = [inf] * (schedule.stages * self.count)
        self.backward = [inf] * (schedule.stages * self.count)
        self.split = [False] * (schedule.stages * self.count)
        self.pair_times: dict[tuple[int, int, bool], float] = {}
        self.sent: list[tuple[float, int]] = []

    def ready(self, row: int, now: float) -> bool:
        """Whether all that an op needs is there."""
        return self.arrival(row) <= now

    def arrival(self, row: int) -> float:
        """When all that an op needs is there, as far as it is known: inf where some of it has not been started."""
        kind, stage = self.kind[row], self.stage[row]
        at = stage * self.count + self.microbatch[row]
        if kind == OpKind.F:
            return 0.0 if stage == 0 else self.forward[at - self.count]
        if kind == OpKind.W:
            return 0.0 if self.split[at] else inf
        if self.forward[at] == inf:
            return inf
        return 0.0 if stage == self.last or kind == OpKind.R else self.backward[at + self.count]

    def start(self, cell: CellRows, rank: int, now: float) -> float:
        """Note what a cell gives to others, in ``sent`` whom it wakes, and return when it ends."""
        kinds, stages = [self.kind[row] for row in cell], [self.stage[row] for row in cell]
        time: float = self.time[kinds[0]][stages[0]]
        if len(cell) == 2:
            time = self._pair(stages[0], stages[1], kinds[1] == OpKind.B)
        end = now + time
        self.sent = []
        for row, kind, stage in zip(cell, kinds, stages, strict=True):
            at = stage * self.count + self.microbatch[row]
            self.split[at] |= kind == OpKind.I
            if kind in (OpKind.W, OpKind.R):
                continue
            table, taker = (self.forward, stage + 1) if kind == OpKind.F else (self.backward, stage - 1)
            to = self.holder[self.microbatch[row]][taker] if 0 <= taker <= self.last else rank
            table[at] = end + self.costs.p2p * (to != rank)
            if to != rank:
                self.sent.append((table[at], to))
        return end

    def _pair(self, forward: int, backward: int, full: bool) -> float:
        """The time of a pair, which is asked for once per pair of stages."""
        key = forward, backward, full
        if key not in self.pair_times:
            self.pair_times[key] = float(self.costs.pair(forward, backward, full))
        return self.pair_times[key]
