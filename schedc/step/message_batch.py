"""One schedule whose cells send before their ends, under many costs at once: its steps are found once per order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Floats, Int32, Int64
from schedc.step.dependencies import Dependencies
from schedc.step.kept import kept
from schedc.step.numba_kernels import FIRST, OUT, SECOND, Kernels, kernels
from schedc.step.numba_messages import (
    BEHIND,
    GRADIENT,
    GRADIENT_FAR,
    INPUT,
    INPUT_FAR,
    INPUT_GRADIENT,
    OUTPUT,
    RANK,
    WATCHED,
    WORK_ROWS,
    advance_messages,
)
from schedc.step.ratios import idle

_WIDTH = 256
"""Costs that the compiled loop runs at a time: the rows that it reads and writes then stay in the caches."""

_IN_MEMORY = 1 << 23
"""Cells times costs that numpy's way holds at a time, three numbers each."""

_NUMPY_OPS, _NUMPY_LEVEL = 3e7, 3e-5
"""Cells per second and seconds per level of numpy's way, roughly: what decides whether to load the compiled loop."""


@dataclass(frozen=True, eq=False)
class MessageOutcomes:
    """What K costs make of one schedule.

    end: [P, K] when the last cell of each rank ends. watched: [watched, K] when the cells that were asked for end.
    """

    end: Floats
    watched: Floats

    @property
    def makespan(self) -> Floats:
        """[K] the last end."""
        return np.asarray(self.end.max(axis=0, initial=0.0))

    def idle(self, busy: Floats) -> Floats:
        """[P, K] idle time of each rank. busy: [P, K] time that it computes."""
        return idle(self.makespan, busy)


def simulate_messages_batch(
    dependencies: Dependencies, kind: Int64, delay: Floats, latency: Floats, watch: Int64 | None = None
) -> MessageOutcomes:
    """The ends that `schedc.step.cells.cell_pricing.simulate_messages` gives for each of K costs, to the last digit.

    kind: [cells] index into ``delay``; delay: [kinds, 3, 3, K] delays as in `schedc.cell.delays`, in one unit.
    latency: [K] time of a message between ranks. watch: cells whose ends are asked for, each once; by default none.
    """
    ranks, total = dependencies.rank_start.size - 1, latency.size
    watch = np.zeros(0, np.int64) if watch is None else watch
    answer = MessageOutcomes(np.zeros((ranks, total)), np.zeros((watch.size, total)))
    levels, cells = dependencies.levels, len(dependencies)
    if levels.stuck.size:
        raise CompilerBug("timeline", f"a schedule with a deadlock, at cells {levels.stuck[:4]}")
    width = min(total, max(1, _IN_MEMORY // max(1, cells)))
    turns = -(-total // max(1, width))
    if loops := kernels(cells * total / _NUMPY_OPS + levels.start.size * turns * _NUMPY_LEVEL):
        _run_compiled(loops, dependencies, kind, delay, latency, watch, answer)
        return answer
    last = dependencies.rank_start[1:] - 1
    runs = np.diff(dependencies.rank_start) > 0
    for low in range(0, total, max(1, width)):
        part = slice(low, low + width)
        ends = _ends(dependencies, kind, delay[..., part], latency[part])
        answer.end[runs, part], answer.watched[:, part] = ends[last[runs]], ends[watch]
    return answer


# The compiled loop.


@kept
def _walk(dependencies: Dependencies) -> tuple[Int32, int]:
    """The table that the compiled loop walks, in order of level, and the number of rows of outputs.

    Each row is used again once nobody waits for what it holds.
    """
    waits, order, loops = _waits(dependencies), dependencies.levels.order, kernels(np.inf)
    if loops is None:
        raise CompilerBug("timeline", "rows of the compiled loop without one")
    last_use = np.full(len(waits), -1)
    for column in waits.T:
        waiting = np.flatnonzero(column >= 0)
        np.maximum.at(last_use, column[waiting], waiting)
    rows_of = np.zeros((len(waits), 6), np.int32)
    rows = int(loops.assign_rows(waits, last_use, rows_of, dependencies.rank_start.size - 1))
    needs = rows_of[1::2, [FIRST, SECOND]]
    table = np.full((order.size, 9), -1, np.int32)
    table[:, RANK] = dependencies.rank[order]
    table[:, [INPUT, GRADIENT]] = np.where(needs >= 0, needs, rows)
    table[:, [INPUT_FAR, GRADIENT_FAR]] = dependencies.remote[:, order].T
    table[:, [OUTPUT, INPUT_GRADIENT]] = rows_of[:, OUT].reshape(-1, 2)
    table[:, BEHIND] = dependencies.sends_activation[order] & (table[:, INPUT_GRADIENT] >= 0)
    return table, rows


def _waits(dependencies: Dependencies) -> Int64:
    """[2 n, 2] outputs that each output waits for, -1 where none, in order of level.

    The cell at place i has two outputs: 2 i of its forward, 2 i + 1 of its backward. The second one waits for all that
    the cell does, so that both have a row before those of the inputs are free.
    """
    order, cells = dependencies.levels.order, len(dependencies)
    position = np.full(cells + 1, -1)
    position[order] = np.arange(cells)
    producers = position[dependencies.producers[:, order]]
    waits = np.full((cells, 2, 2), -1)
    waits[:, 1] = np.where(producers >= 0, 2 * producers + np.array([[0], [1]]), -1).T
    return waits.reshape(-1, 2)


def _run_compiled(
    loops: Kernels,
    dependencies: Dependencies,
    kind: Int64,
    delay: Floats,
    latency: Floats,
    watch: Int64,
    answer: MessageOutcomes,
) -> None:
    table, rows = _walk(dependencies)
    order = dependencies.levels.order
    if watch.size:
        row = np.full(len(dependencies), -1, np.int32)
        row[watch] = np.arange(watch.size)
        table = table.copy()
        table[:, WATCHED] = row[order]
    uses = (delay[:, :, 1:] > -np.inf).any(axis=(1, 3))
    value = np.zeros((rows + WORK_ROWS, min(_WIDTH, latency.size)))
    delays = np.ascontiguousarray(delay.reshape(len(delay), 9, -1))
    advance = loops.jit(advance_messages)
    advance(table, kind[order], uses, delays, latency, value, answer.end, answer.watched)


# numpy's way.


def _ends(dependencies: Dependencies, kind: Int64, delay: Floats, latency: Floats) -> Floats:
    """[cells, K] when each cell ends: what the compiled loop does, level by level."""
    levels, cells = dependencies.levels, len(dependencies)
    there = np.zeros((3, cells + 1, latency.size))  # the last: what nobody waits for
    waits = np.stack([dependencies.previous, *dependencies.producers]).astype(np.int64)
    far = np.concatenate([np.zeros((1, cells), bool), dependencies.remote])
    for low, high in pairwise(levels.start.tolist()):
        now = levels.order[low:high]
        arrival = [there[row, waits[row, now]] + far[row, now, np.newaxis] * latency for row in range(3)]
        for output in range(3):
            there[output, now] = np.maximum.reduce([delay[kind[now], output, row] + arrival[row] for row in range(3)])
        behind = now[dependencies.sends_activation[now]]
        there[2, behind] = there[1:, behind].max(axis=0)
    return np.asarray(there[0, :-1])
