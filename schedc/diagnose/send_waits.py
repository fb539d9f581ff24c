"""Waits for sends as inputs of a replayed step.

A transport may complete a send only when its receive is posted, as gloo does. A rank that waits for such a send then
waits for another rank: for the cell in front of which that rank posts the receive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from schedc.diagnose.recording import Key, RunRecording
from schedc.ir.arrays import Bools, Floats, Int64
from schedc.step.dependencies import Dependencies
from schedc.step.measured import CellInputs, with_inputs

_BLOCKED = 0.05
"""Milliseconds above which a wait for a send that ended after the post of its receive was blocked by it."""


@dataclass(frozen=True, eq=False)
class SendWaits:
    """Waits for sends that were blocked in a step or more, in S steps.

    cell: [waits] the cell behind each wait. producer: [waits] the last cell of the receiver in front of the post of its
    receive; -1: none. begin, end, posted: [S, waits] ms of the wait, and when the receive was posted.
    blocked: [S, waits] whether the wait was. inputs: messages, clocks of ranks, and these waits.
    row: [waits] which input each is.
    """

    cell: Int64
    producer: Int64
    begin: Floats
    end: Floats
    posted: Floats
    blocked: Bools
    inputs: CellInputs
    row: Int64


def send_waits(
    recording: RunRecording, known: Dependencies, reader: Mapping[Key, int], posted: Floats, ends: Floats, begin: Floats
) -> SendWaits:
    """The waits of a recording. reader: the cell that waits for each message. posted: [S, 2, cells] as in
    `MeasuredSteps`; ends: [S, cells] ends of cells; begin: [S] begin of each step on the clock of the recording."""
    found: list[tuple[int, int, int]] = []  # way, cell that reads the message, cell behind the wait
    times: list[list[tuple[float, float]]] = []
    for rank, steps in enumerate(recording.ranks):
        low, high = known.rank_start[rank : rank + 2].tolist()
        for key, (_, _, number) in steps[0].awaited.items():
            if key in reader and low + number < high and all(key in step.awaited for step in steps):
                found.append((key[0], reader[key], low + number))
                times.append([step.awaited[key][:2] for step in steps])
    table = np.array(times).reshape(len(found), len(begin), 2)
    start, end = np.moveaxis(table, 2, 0).transpose(0, 2, 1) - begin[:, None]
    way, read, cell = np.array(found, np.int64).reshape(-1, 3).T
    there = posted[:, way, read]
    blocked = (there > start) & (end - start > _BLOCKED) & (there < end + _BLOCKED)
    some = np.flatnonzero(blocked.any(axis=0))
    posts = [_before(known, ends, int(read[i]), there[blocked[:, i], i], blocked[:, i]) for i in some]
    inputs, row = with_inputs(known, cell[some], np.array(posts, np.int64))
    some, producer = some[: row.size], np.array(posts[: row.size], np.int64)
    measured = start[:, some], end[:, some], there[:, some]
    return SendWaits(cell[some], producer, *measured, blocked[:, some], inputs, row)


def _before(known: Dependencies, ends: Floats, read: int, posted: Floats, steps: Bools) -> int:
    """The last cell of the rank of ``read`` that had ended in each of some steps when it posted a receive; -1: none."""
    low = int(known.rank_start[known.rank[read]])
    ended = (ends[steps, low:read] <= posted[:, None]).all(axis=0)
    return low + int(np.flatnonzero(ended)[-1]) if ended.any() else -1
