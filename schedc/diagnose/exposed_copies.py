"""Copies of states and of activations as parts of a replayed step: what STARTs and JOINs take of a rank's time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.diagnose.recording import RunRecording
from schedc.ir.arrays import Floats
from schedc.step.dependencies import Dependencies


@dataclass(frozen=True, eq=False)
class ExposedCopies:
    """Time of ranks that copies took in S steps, in ms.

    snapshots, offloads: [S, 3, cells] in front of the look of a cell for messages, between this and its compute, and
    behind the last cell of a rank. behind: [S, cells] from the end of a rank's last cell to that of its last copy.
    """

    snapshots: Floats
    offloads: Floats
    behind: Floats


def exposed_copies(recording: RunRecording, known: Dependencies, wait: Floats, end: Floats) -> ExposedCopies:
    """The copies of a recording. wait, end: [S, cells] as in `CellRun`, on the clock of the recording."""
    tables = np.zeros((2, wait.shape[0], 3, wait.shape[1]))
    behind = np.zeros(wait.shape)
    for rank, steps in enumerate(recording.ranks):
        low, high = known.rank_start[rank : rank + 2].tolist()
        for number, step in enumerate(steps):
            for copy in step.copies if low < high else ():
                cell = min(low + copy.number, high - 1)
                place = 2 if low + copy.number == high else int(copy.begin >= wait[number, cell])
                tables[int(not copy.state), number, place, cell] += copy.end - copy.begin
                if place == 2:
                    behind[number, cell] = max(behind[number, cell], copy.end - end[number, cell])
    return ExposedCopies(tables[0], tables[1], behind)
