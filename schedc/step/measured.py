"""Steps under times that were measured: a time of its own for every cell, and a lag of its own for every input of one.

The walk is that of `schedc.step.lowering.closed_cells`. Times by held stage, by rank or by link are such tables too:
the caller repeats a value for the cells and messages that share it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int32, Int64, bincount, repeat
from schedc.step.dependencies import Dependencies
from schedc.step.kept import kept
from schedc.step.lowering import closed_cells
from schedc.step.timeline import Timeline, arrivals, timeline_of
from schedc.step.walk import Walk, run


class CellInputs(NamedTuple):
    """What cells wait for, as inputs of a walk: each has a row of lags, behind row 0, which is zero.

    end: [cells] instruction of each cell. reader, producer: [inputs] cells; producer -1: time 0.
    message: [inputs] whether the input is a message of another rank.
    way: [inputs] of a message the row of `Dependencies.producers`, 0 or 1; -1: the rank's clock in front of a cell;
    -2: another input (`with_inputs`).
    """

    walk: Walk
    end: Int32
    reader: Int64
    producer: Int64
    message: Bools
    way: Int64


@kept
def cell_inputs(dependencies: Dependencies) -> CellInputs:
    """The inputs of all cells of a schedule without deadlock."""
    walk, end = closed_cells(dependencies)
    cell = np.empty(len(walk) + 1, np.int64)
    cell[end], cell[-1] = np.arange(end.size), -1
    reader = repeat(cell[:-1], np.diff(walk.first))
    message = walk.lag > 0
    way = np.full(reader.size, -1, np.int64)
    places = np.flatnonzero(message)
    second = np.append(False, reader[places][1:] == reader[places][:-1])
    way[places] = np.where(second | ~dependencies.remote[0, reader[places]], 1, 0)
    rows = np.arange(1, reader.size + 1, dtype=np.int32)
    return CellInputs(replace(walk, lag=rows), end, reader, cell[walk.source], message, way)


def with_inputs(dependencies: Dependencies, reader: Int64, producer: Int64) -> tuple[CellInputs, Int64]:
    """`cell_inputs` and more of them, and [more] which inputs these are; none if a cell would wait for itself.

    reader, producer: [more] cells, as in `CellInputs`.
    """
    own, cells = cell_inputs(dependencies), len(dependencies)
    readers, producers = np.append(own.reader, reader), np.append(own.producer, producer)
    order = _in_order(cells, readers, producers)
    if not reader.size or order.size < cells:
        return own, np.zeros(0, np.int64)
    end = np.empty(cells + 1, np.int32)
    end[order], end[-1] = np.arange(cells), -1
    place = np.argsort(end[readers], kind="stable")
    first = np.append(0, np.cumsum(bincount(end[readers], minlength=cells))).astype(np.int32)
    rows = np.arange(1, place.size + 1, dtype=np.int32)
    walk = Walk(np.zeros(cells, np.int8), first, end[producers[place]], rows, order.astype(np.int32))
    message = np.append(own.message, np.zeros(reader.size, bool))[place]
    way = np.append(own.way, np.full(reader.size, -2))[place]
    where = np.empty(place.size, np.int64)
    where[place] = np.arange(place.size)
    return CellInputs(walk, end[:-1], readers[place], producers[place], message, way), where[own.reader.size :]


def _in_order(cells: int, reader: Int64, producer: Int64) -> Int64:
    """Cells in an order in which each comes behind its producers; without those that wait for themselves."""
    readers: list[list[int]] = [[] for _ in range(cells)]
    left = [0] * cells
    for a, b in zip(reader.tolist(), producer.tolist(), strict=True):
        if b >= 0:
            readers[b].append(a)
            left[a] += 1
    order = [cell for cell in range(cells) if not left[cell]]
    for cell in order:
        for behind in readers[cell]:
            left[behind] -= 1
            if not left[behind]:
                order.append(behind)
    return np.array(order, np.int64)


def measured_ends(inputs: CellInputs, duration: Floats, lag: Floats, cells: Int64 | None = None) -> Floats:
    """[cells or the given ones, K] when cells end. duration: [cells, K]; lag: [inputs, K]."""
    lags = np.concatenate([np.zeros((1, lag.shape[1])), lag])
    return run(inputs.walk, lags, duration, watch=inputs.end if cells is None else inputs.end[cells])


def measured_makespans(
    dependencies: Dependencies, inputs: CellInputs, duration: Floats, lag: Floats, behind: Floats
) -> Floats:
    """[K] when the last rank ends; arguments as for `measured_ends`. behind: [cells, K] time behind last cells."""
    low, high = dependencies.rank_start[:-1], dependencies.rank_start[1:]
    last = high[low < high] - 1
    ends = measured_ends(inputs, duration, lag, last) + behind[last]
    return np.asarray(ends.max(axis=0, initial=0.0))


def timeline_without_latency(dependencies: Dependencies, duration: Floats) -> Timeline:
    """The timeline of cells that take ``duration``, [cells], where messages take no time."""
    inputs = cell_inputs(dependencies)
    end = measured_ends(inputs, duration[:, None], np.zeros((inputs.reader.size, 1)))[:, 0]
    return timeline_of(dependencies, duration, end, arrivals(dependencies, end, 0.0))
