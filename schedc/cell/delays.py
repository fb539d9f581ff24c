"""Delays of a cell: from when its rank is free and its messages arrive to when it ends and its messages leave.

A cell program only adds times and takes the later of two. So each output time is the largest of three sums:

    out[i] = max over j of (arrival[j] + delay[i, j])

    arrival   [3] when the rank is free, when the forward's inputs and the backward's gradients arrive
    out       [3] when the cell ends, when the forward's output and the gradient of the backward's inputs are complete
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from schedc.cell.bounds import delay_bounds
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts
from schedc.cell.graph import QUEUES, StageShape
from schedc.cell.program import MESSAGED, Action, CellProgram, Edge
from schedc.cell.tasks import Tasks, tasks_of, tasks_of_program
from schedc.ir.arrays import Floats

Delays = npt.NDArray[np.float64]
"""[3, 3] the delays above, in the unit of the cell's costs; -inf where an output does not depend on an arrival.
An output that the cell does not have counts as complete at the end of the cell."""


@lru_cache(4096)
def program_delays(
    program: CellProgram, forward: StageShape | None, backward: StageShape | None, costs: CellCosts
) -> Delays:
    """[3, 3] delays of a cell program; not to be written to."""
    tasks = tasks_of_program(program, forward, backward)
    delays = delay_batch(program, tasks, CellCostBatch.of([costs]).durations(tasks))[..., 0]
    delays.flags.writeable = False
    return delays


def delay_batch(program: CellProgram, tasks: Tasks, duration: Floats) -> Floats:
    """[3, 3, K] delays of a cell program under K costs; none grows where a time falls.

    The program runs once as `schedc.cell.simulate.play` runs it, for each arrival alone, all side by side.
    tasks: those of the program's cell. duration: [tasks, K] in time units, as the delays.
    """
    clock, *messages = np.where(np.eye(3, dtype=bool)[..., None], 0.0, np.full(duration.shape[1], -np.inf))
    free = [np.full_like(clock, -np.inf)] * len(QUEUES)
    message, complete, ends = dict(zip(MESSAGED, messages, strict=True)), {}, {}
    for part in program.parts:
        if isinstance(part, Edge):
            if part.opens:
                clock = np.maximum(clock, message[part.half])
            else:
                complete[part.half] = clock
            continue
        task = tasks.number[part.half, part.node]
        if part.action is Action.RUN:
            clock = clock + duration[task]
        elif part.action is Action.START:
            queue = tasks.queues[task]
            ends[task] = free[queue] = np.maximum(clock, free[queue]) + duration[task]
        else:
            clock = np.maximum(clock, ends[task])
    return np.stack([clock, *(complete.get(half, clock) for half in MESSAGED)])


def closed_delays(duration: float) -> Delays:
    """[3, 3] delays of a cell that begins when all its messages are there, and whose messages leave at its end."""
    return np.full((3, 3), duration)


def lower_bound_delays(
    kind: str, forward: StageShape | None, backward: StageShape | None, costs: CellCostBatch
) -> Floats:
    """[3, 3, K] a lower bound of each delay over all programs of a cell: longest chains of dependent tasks."""
    tasks = tasks_of(kind, forward, backward)
    return delay_bounds(tasks, costs.durations(tasks))
