"""A cell program on the ranks of a group, whose arrivals are given: the walk of its instructions alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedc.cell.group import GroupTasks
from schedc.ir.arrays import Floats
from schedc.step.cells.played_cells import RankSets, play
from schedc.step.numba_kernels import MEET
from schedc.step.walk import Walk, run


class Played(NamedTuple):
    """outs: [3, ranks] end, output and gradient; compute: [ranks]; carried, exposed, waiting: [lanes, ranks]."""

    outs: Floats
    compute: Floats
    carried: Floats
    exposed: Floats
    waiting: Floats


def play_alone(tasks: GroupTasks, times: Sequence[Floats], arrivals: Floats) -> Played:
    """times: [tasks][1, ranks]; arrivals: [3, ranks] when the rank is free, and when its two messages are there."""
    sets = RankSets(arrivals.shape[1])
    cell = play(tasks, sets, closed=False, behind=False)
    steps = cell.instructions.steps
    inputs = [[-1]] * 3 + [[3 + read if read >= 0 else -1 - read for read, _ in step.inputs] for step in steps]
    source = np.array([read for reads in inputs for read in reads], np.int32)
    first = np.cumsum([0, *map(len, inputs)])
    add = [0, 1, 2, *(step.add if step.op == MEET or step.add < 0 else 3 + step.add for step in steps)]
    op = np.array([0, 0, 0, *(step.op for step in steps)], np.int8)
    walk = Walk(op, first, source, np.zeros_like(source), np.array(add, np.int32))
    adds = np.concatenate([arrivals, np.reshape(times, (-1, arrivals.shape[1]))])
    values = run(walk, np.zeros((1, arrivals.shape[1])), adds, sets=sets.table)
    compute, lanes = cell.spent(values, np.array([3], np.int32), adds, np.array([3], np.int32))
    return Played(values[3 + np.array(cell.instructions.outs)], compute[0], *lanes[:, :, 0])
