"""The loops that numba compiles, where it is installed and there is work enough; elsewhere numpy does the same.

They are plain functions of arrays. numpy's way stands beside each call and gives the same result bit for bit: both
add and compare the same float64 values in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from schedc.ir.compiled import IMPORT_SECONDS, compile_seconds, jit

_COMPILE_SECONDS = 13.0
"""What compiling them costs, once on a machine: numba keeps the machine code on disk."""

_CALL_SECONDS = 1e-4
"""The compiled loops, once they are loaded."""

RANK, FIRST, SECOND, OUT, COST, FRESH = range(6)
"""Columns of the table that `advance` walks; a row is a step.

RANK: the step's rank. FIRST, SECOND: the rows of the outputs that it waits for, or -1. OUT: the row that keeps its own
end, or -1. COST: its row of durations. FRESH: 1 for the first step of a rank.
"""


def _interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@dataclass(frozen=True)
class Kernels:
    """The compiled loops of the analyses, and ``jit``, which compiles those of others (each once)."""

    lockstep: Any
    assign_rows: Any
    advance: Any
    ends: Any
    jit: Callable[[Callable[..., Any]], Callable[..., Any]] = _interpreted


_loaded: list[Kernels | None] = []
_left_to_numpy = [0.0]


def kernels(numpy_seconds: float) -> Kernels | None:
    """The compiled loops if they are worth it for work that numpy does in about ``numpy_seconds`` seconds.

    Before the loops are loaded, such work adds up over the calls. A process that has left as much to numpy as loading
    costs will have more work of this kind. That process spends at most twice what the better choice would have cost.
    """
    if _loaded:
        return _loaded[0] if numpy_seconds >= _CALL_SECONDS else None
    _left_to_numpy[0] += numpy_seconds
    if _left_to_numpy[0] < IMPORT_SECONDS:  # most processes: they need not look for machine code
        return None
    if _left_to_numpy[0] < IMPORT_SECONDS + _compile_seconds():
        return None
    _loaded.append(load())
    return _loaded[0]


@cache
def _compile_seconds() -> float:
    """What the loops of this file still have to be compiled for."""
    return compile_seconds(Path(__file__), _COMPILE_SECONDS)


@cache
def load() -> Kernels | None:
    """The compiled loops, None without numba. The machine code is kept on disk where a folder can be written."""
    if (compiled := jit()) is None:
        return None
    return Kernels(compiled(lockstep), compiled(assign_rows), compiled(advance), compiled(ends), compiled)


def lockstep(producers: Any, rank_start: Any, order: Any, level: Any, start: Any, head: Any) -> int:
    """Runs each rank's next cell, in rounds; gives the number of rounds (see `schedc.step.dependencies`).

    producers: [2, cells]; rank_start: [P + 1]; filled in: order [cells], level [cells] (-1 before), start
    [cells + 1], head [P] (the first cells before, after it the first that never ran).
    """
    ranks = rank_start.size - 1
    ran, rounds = 0, 0
    while True:
        begin = ran
        for rank in range(ranks):
            cell = head[rank]
            if cell == rank_start[rank + 1]:
                continue
            first, second = producers[0, cell], producers[1, cell]
            # what runs in this round has no level yet, so that nothing of it counts as done
            if (first < 0 or level[first] >= 0) and (second < 0 or level[second] >= 0):
                order[ran] = cell
                head[rank] += 1
                ran += 1
        if ran == begin:
            return rounds
        start[rounds] = begin
        for index in range(begin, ran):
            level[order[index]] = rounds
        rounds += 1
        start[rounds] = ran


def assign_rows(waits: Any, last_use: Any, table: Any, rows: int) -> int:
    """Fills FIRST, SECOND and OUT of ``table`` with rows that are used again once nobody waits for what they hold.

    waits: [n, 2] steps, -1 where none; last_use: [n] the last step that waits for it, -1 where none does.
    rows: the first free row. Gives the number of rows in all.
    """
    free = np.empty(waits.shape[0], np.int64)
    count = 0
    for step in range(waits.shape[0]):
        if last_use[step] >= 0:
            if count:
                count -= 1
                table[step, OUT] = free[count]
            else:
                table[step, OUT] = rows
                rows += 1
        else:
            table[step, OUT] = -1
        for column in range(2):
            producer = waits[step, column]
            table[step, FIRST + column] = table[producer, OUT] if producer >= 0 else -1
        # given back after this step has its own row: no step reads the row that it writes
        for column in range(2):
            producer = waits[step, column]
            again = column == 1 and producer == waits[step, 0]  # two halves of a pair that wait for two of one pair
            if producer >= 0 and last_use[producer] == step and not again:
                free[count] = table[producer, OUT]
                count += 1
    return rows


def advance(table: Any, duration: Any, latency: Any, value: Any, begin: Any, end: Any) -> None:
    """Runs every step under K cost vectors, as many at a time as ``value`` is wide.

    table: [n, 6]; duration: [classes, K]; latency: [K]; value: [rows, width] work space, the first P rows for when
    each rank is free. Filled in: begin, end: [P, K] start of each rank's first step and end of its last.
    """
    ranks, total, width = end.shape[0], latency.size, value.shape[1]
    spent, delay = np.empty((duration.shape[0], width)), np.empty(width)
    for low in range(0, total, width):
        count = min(width, total - low)
        spent[:, :count] = duration[:, low : low + count]
        delay[:count] = latency[low : low + count]
        value[:ranks, :count] = 0.0
        for step in range(table.shape[0]):
            rank, first, second = table[step, 0], table[step, 1], table[step, 2]
            out, cost, fresh = table[step, 3], table[step, 4], table[step, 5]
            if second >= 0:
                for k in range(count):
                    a, b, c = value[first, k], value[second, k], value[rank, k]
                    a = (a if a > b else b) + delay[k]
                    value[rank, k] = a if a > c else c
            elif first >= 0:
                for k in range(count):
                    a, c = value[first, k] + delay[k], value[rank, k]
                    value[rank, k] = a if a > c else c
            if fresh:
                begin[rank, low : low + count] = value[rank, :count]
            if out >= 0:
                for k in range(count):
                    t = value[rank, k] + spent[cost, k]
                    value[rank, k] = t
                    value[out, k] = t
            else:
                for k in range(count):
                    value[rank, k] += spent[cost, k]
        end[:, low : low + count] = value[:ranks, :count]


def ends(
    order: Any, previous: Any, producers: Any, remote: Any, duration: Any, latency: float, start: Any, end: Any
) -> None:
    """Fills ``start`` and ``end``, [cells], in an order in which every cell comes after all that it waits for.

    order, previous, duration: [cells]; producers, remote: [2, cells]; -1 where a cell waits for nothing.
    """
    for step in range(order.size):
        cell = order[step]
        begin = end[previous[cell]] if previous[cell] >= 0 else 0.0
        for row in range(2):
            producer = producers[row, cell]
            if producer >= 0:
                arrival = end[producer] + latency if remote[row, cell] else end[producer]
                begin = arrival if arrival > begin else begin
        start[cell] = begin
        end[cell] = begin + duration[cell]
