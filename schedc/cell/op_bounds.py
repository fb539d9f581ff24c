"""Bounds of the ops of a cell, and those of cells that they make: two ops of a pair share queues, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.cell.bounds import busy_bounds, end_bounds, latest, queue_work, reached_from
from schedc.cell.program import HALVES
from schedc.cell.tasks import Tasks
from schedc.ir.arrays import Floats


@dataclass(frozen=True, eq=False)
class OpBounds:
    """What bounds cells with an op under K costs, whatever their programs.

    place: 0 for an op on the first graph of a cell, 1 on the second (`schedc.cell.program.HALVES`).
    end: [3, K] `schedc.cell.bounds.end_bounds`. leaving: [3, K] the longest chain to the tasks that complete the op's
    message, from any task, and from tasks of the halves with messages; -inf without one. None without a message.
    work, before, behind: [queues, K] time of the op's tasks on a queue, the least chain in front of one, and behind.
    """

    place: int
    end: Floats
    leaving: Floats | None
    work: Floats
    before: Floats
    behind: Floats

    @classmethod
    def of(cls, tasks: Tasks, duration: Floats) -> OpBounds:
        """tasks: bounds of a cell of one op. duration: [tasks, K] in time units, as the bounds."""
        place = int(not HALVES[tasks.kind][0])
        reached = reached_from(tasks, duration)
        last = tasks.leaving[place]
        leaving = None if last is None else latest(reached[list(last)])
        return cls(place, end_bounds(tasks, duration, reached), leaving, *queue_work(tasks, duration, reached[:, 0]))


def delays_of(*ops: OpBounds) -> Floats:
    """[3, 3, K] lower bounds of the delays of the cell of one op or two, as `schedc.cell.bounds.delay_bounds`."""
    end = np.maximum.reduce([op.end for op in ops])
    work = np.sum([op.work for op in ops], axis=0)
    before, behind = (np.minimum.reduce([getattr(op, name) for op in ops]) for name in ("before", "behind"))
    whole = np.maximum(np.maximum(end[0], 0.0), busy_bounds(work, before, behind))
    completed: list[Floats | None] = [None, None]
    for op in ops:
        if op.leaving is not None:
            completed[op.place] = op.leaving
    bounds = np.stack([end, *(end if leaving is None else leaving for leaving in completed)])
    bounds[:, 0] = np.maximum(bounds[:, 0], 0.0)
    bounds[[True, *(leaving is None for leaving in completed)], 0] = whole
    return np.asarray(bounds)
