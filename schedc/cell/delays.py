"""Delays of a cell: from when its rank is free and its messages arrive to when it ends and its messages leave.

A cell program only adds times and takes the later of two. So each output time is the largest of three sums:

    out[i] = max over j of (arrival[j] + delay[i, j])

    arrival   [3] when the rank is free, when the forward's inputs and the backward's gradients arrive
    out       [3] when the cell ends, when the forward's output and the gradient of the backward's inputs are complete
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.cell.local_search import lower_bound
from schedc.cell.program import MESSAGED, CellProgram
from schedc.cell.simulate import ArrivalTimes, Played, play
from schedc.cell.tasks import Tasks, tasks_of

Delays = npt.NDArray[np.float64]
"""[3, 3] the delays above, in the unit of the cell's costs; -inf where an output does not depend on an arrival.
An output that the cell does not have counts as complete at the end of the cell."""


def program_delays(
    program: CellProgram, forward: StageShape | None, backward: StageShape | None, costs: CellCosts
) -> Delays:
    """[3, 3] delays of a cell program, from three simulations with one arrival each."""
    alone = np.where(np.eye(3, dtype=bool), 0.0, -math.inf).tolist()
    played = [_outs(play(program, forward, backward, costs, arrivals=ArrivalTimes(*row))) for row in alone]
    return np.array(played).T


def closed_delays(duration: float) -> Delays:
    """[3, 3] delays of a cell that begins when all its messages are there, and whose messages leave at its end."""
    return np.full((3, 3), duration)


def lower_bound_delays(kind: str, forward: StageShape | None, backward: StageShape | None, costs: CellCosts) -> Delays:
    """[3, 3] a lower bound of each delay over all programs of a cell: longest chains of dependent tasks."""
    tasks = tasks_of(kind, forward, backward)
    duration = tasks.durations(costs, costs)
    every = range(len(tasks))
    of_half = [[index for index in every if tasks.all[index].half is half] for half in MESSAGED]
    completing = [every if last is None else last for last in (None, *tasks.leaving)]
    bounds = np.array([[_chain(tasks, duration, starts, ends) for starts in (every, *of_half)] for ends in completing])
    bounds[:, 0] = np.maximum(bounds[:, 0], 0.0)
    bounds[[last is None for last in (None, *tasks.leaving)], 0] = lower_bound(tasks, duration)
    return bounds


def _outs(played: Played) -> list[float]:
    outputs = [played.duration if time is None else time for time in (played.activation_at, played.gradient_at)]
    return [played.duration, *outputs]


def _chain(tasks: Tasks, duration: Sequence[float], starts: Container[int], ends: Iterable[int]) -> float:
    """The longest chain from the beginning of one of ``starts`` to the end of one of ``ends``; -inf without one."""
    reached = [-math.inf] * len(tasks)
    for index, task in enumerate(tasks.all):
        before = max((reached[earlier] for earlier in task.after), default=-math.inf)
        reached[index] = duration[index] + max(before, 0.0 if index in starts else -math.inf)
    return max((reached[index] for index in ends), default=-math.inf)
