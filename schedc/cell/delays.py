"""When a cell ends and its messages leave, by when it may begin and its messages come: closed forms, per kind.

A cell program only adds times and waits for the later of two, so that each of these is the largest of three sums:

    out[i] = max over j of (arrival[j] + delay[i, j])

    arrival   when the rank is free, the forward's inputs are there, the backward's gradients are there
    out       the end of the cell, the output of its forward, the gradient of its backward's inputs
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
"""[3, 3] the delays above; -inf where one does not wait for the other. What a cell does not have leaves at its end."""


def program_delays(
    program: CellProgram, forward: StageShape | None, backward: StageShape | None, costs: CellCosts
) -> Delays:
    """Those of a cell program: it is played with each of the three arrivals alone."""
    alone = np.where(np.eye(3, dtype=bool), 0.0, -math.inf).tolist()
    played = [_outs(play(program, forward, backward, costs, arrivals=ArrivalTimes(*row))) for row in alone]
    return np.array(played).T


def closed_delays(duration: float) -> Delays:
    """Those of a cell that begins when all is there, and whose messages leave at its end."""
    return np.full((3, 3), duration)


def lower_bound_delays(kind: str, forward: StageShape | None, backward: StageShape | None, costs: CellCosts) -> Delays:
    """Delays that no program of the cell is below, each alone: the longest chains of what needs each other."""
    tasks = tasks_of(kind, forward, backward)
    duration = tasks.durations(costs, costs)
    every = range(len(tasks))
    opened = [[at for at in every if tasks.all[at].half is half] for half in MESSAGED]
    wanted = [every if leaving is None else leaving for leaving in (None, *tasks.leaving)]
    found = np.array([[_chain(tasks, duration, starts, ends) for starts in (every, *opened)] for ends in wanted])
    found[:, 0] = np.maximum(found[:, 0], 0.0)
    found[[leaving is None for leaving in (None, *tasks.leaving)], 0] = lower_bound(tasks, duration)
    return found


def _outs(played: Played) -> list[float]:
    leaves = [played.duration if at is None else at for at in (played.activation_at, played.gradient_at)]
    return [played.duration, *leaves]


def _chain(tasks: Tasks, duration: Sequence[float], starts: Container[int], ends: Iterable[int]) -> float:
    """The longest chain from the beginning of one of ``starts`` to the end of one of ``ends``; -inf without one."""
    reached = [-math.inf] * len(tasks)
    for at, task in enumerate(tasks.all):
        before = max((reached[other] for other in task.after), default=-math.inf)
        reached[at] = duration[at] + max(before, 0.0 if at in starts else -math.inf)
    return max((reached[at] for at in ends), default=-math.inf)
