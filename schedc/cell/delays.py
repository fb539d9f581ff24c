"""Delays of a cell: from when its rank is free and its messages arrive to when it ends and its messages leave.

A cell program only adds times and takes the later of two. So each output time is the largest of three sums:

    out[i] = max over j of (arrival[j] + delay[i, j])

    arrival   [3] when the rank is free, when the forward's inputs and the backward's gradients arrive
    out       [3] when the cell ends, when the forward's output and the gradient of the backward's inputs are complete
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from schedc.cell.bounds import delay_bounds
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.cell.program import CellProgram
from schedc.cell.simulate import ArrivalTimes, Played, play
from schedc.cell.tasks import tasks_of
from schedc.ir.arrays import Floats

Delays = npt.NDArray[np.float64]
"""[3, 3] the delays above, in the unit of the cell's costs; -inf where an output does not depend on an arrival.
An output that the cell does not have counts as complete at the end of the cell."""


@lru_cache(4096)
def program_delays(
    program: CellProgram, forward: StageShape | None, backward: StageShape | None, costs: CellCosts
) -> Delays:
    """[3, 3] delays of a cell program, from three simulations with one arrival each; not to be written to."""
    alone = np.where(np.eye(3, dtype=bool), 0.0, -math.inf).tolist()
    played = [_outs(play(program, forward, backward, costs, arrivals=ArrivalTimes(*row))) for row in alone]
    delays = np.array(played).T
    delays.flags.writeable = False
    return delays


def closed_delays(duration: float) -> Delays:
    """[3, 3] delays of a cell that begins when all its messages are there, and whose messages leave at its end."""
    return np.full((3, 3), duration)


def lower_bound_delays(
    kind: str, forward: StageShape | None, backward: StageShape | None, costs: CellCostBatch
) -> Floats:
    """[3, 3, K] a lower bound of each delay over all programs of a cell: longest chains of dependent tasks."""
    tasks = tasks_of(kind, forward, backward)
    return delay_bounds(tasks, costs.durations(tasks))


def _outs(played: Played) -> list[float]:
    outputs = [played.duration if time is None else time for time in (played.activation_at, played.gradient_at)]
    return [played.duration, *outputs]
