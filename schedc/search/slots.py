"""Draws slot patterns: priorities that send microbatches through the stages in passes of one slope each.

A forward's slot grows along the stages by the slope of the pass, which is 1 to 3 slots per stage. The backward
goes back likewise, with slopes of its own. Microbatches form units of 1, 2, P/2 or P, which follow one another as fast
as ranks can work. Waves, V shapes and loops are such patterns, and so are their published orders: Hanayo (Liu et al.,
arXiv 2308.15762, section 3), and building blocks with a controlled lifespan (Qi et al., arXiv 2405.15362, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Floats, Int64, repeat
from schedc.ir.op_tables import TURN
from schedc.ir.ops import OpKind
from schedc.search.problem import SearchProblem, stage_key

_GRAIN = 64
"""Steps of a priority per slot."""

_LATE = 10**6
"""Slots after which a W comes that runs only where nothing else can."""


@dataclass(frozen=True, eq=False)
class SlotCells:
    """What a pattern needs to know of the cells of a problem; those of a pair count by their forward.

    turn: [cells] forward, backward or weight gradient. stage: [cells] stages count on from pipe to pipe. place: [cells]
        number of the cell among those of its turn and stage: the microbatch's, in the kept sequence.
    passes: [stages of pipes] which of its rank's stages a stage is, in the pipe. time: [2, stages] of forwards and
        backwards, in slots.
    work: slots of a rank for one microbatch, on average.
    """

    turn: Int64
    stage: Int64
    place: Int64
    passes: Int64
    time: Floats
    work: float
    ranks: int
    stages: int

    @classmethod
    def of(cls, problem: SearchProblem) -> SlotCells:
        schedule, first = problem.schedule, problem.dependencies.first
        turn, key = TURN[schedule.kind[first]].astype(np.int64), stage_key(schedule)[first]
        queue = key * 3 + turn
        order = np.argsort(queue, kind="stable")
        start = np.flatnonzero(np.append(True, np.diff(queue[order]) != 0))
        place = np.empty(order.size, np.int64)
        place[order] = np.arange(order.size) - repeat(start, np.diff(np.append(start, order.size)))
        stages = schedule.stages
        rank_of_stage = schedule.placement.rank_of_stage
        passes = np.concatenate([[int((row[:s] == row[s]).sum()) for s in range(stages)] for row in rank_of_stage])
        slot = float(problem.duration.mean())
        time = np.ones((2, passes.size))
        for number in range(2):
            rows = np.flatnonzero(turn == number)
            time[number, key[rows]] = problem.duration[rows] / slot
        work = float(problem.duration.sum()) / slot / schedule.ranks / schedule.microbatches
        return cls(turn, key, place, passes, time, work, schedule.ranks, stages)

    def priority(self, draw: np.random.Generator) -> Int64:
        """[cells] the slots of a pattern that is drawn, in steps of `_GRAIN` per slot."""
        unit = int(draw.choice([1, 2, max(1, self.ranks // 2), self.ranks]))
        apart = self.work * unit * float(draw.choice([1, 1, 1, 1.05, 0.95]))
        within = float(draw.choice([1, 2, 2, 3, 4, self.work]))
        slots = self._slots(draw)
        at = slots[np.minimum(self.turn, 1), self.stage] + apart * (self.place // unit) + within * (self.place % unit)
        late = float(draw.choice([_LATE, *draw.uniform(0, 2 * self.work, 2)]))
        at += np.where(self.turn == TURN[OpKind.W], late, 0.0)
        grain = draw.integers(0, _GRAIN, at.size) if draw.random() < 0.3 else (self.turn == 0) * draw.integers(0, 2)
        priority: Int64 = (at * _GRAIN).astype(np.int64) + grain
        return priority

    def _slots(self, draw: np.random.Generator) -> Floats:
        """[2, stages of pipes] slots of the first microbatch's forward and backward, from the first stage and back."""
        slopes = draw.integers(1, 4, (2, int(self.passes.max()) + 1))
        steps = self.time * slopes[[[0], [1]], self.passes]
        slots = np.empty_like(steps)
        for first in range(0, self.passes.size, self.stages):
            pipe = slice(first, first + self.stages)
            slots[0, pipe] = np.cumsum(steps[0, pipe]) - steps[0, pipe]
            back = np.cumsum(steps[1, pipe][::-1]) - steps[1, pipe][::-1]
            slots[1, pipe] = back[::-1] + slots[0, pipe][-1] + self.time[0, pipe][-1]
        return slots
