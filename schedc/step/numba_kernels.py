"""The loops that numba compiles, where it is installed and there is work enough; elsewhere numpy does the same.

They are plain functions of arrays. numpy's way stands beside each call and gives the same result bit for bit: both
add and compare the same float64 values in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from schedc.ir.compiled import IMPORT_SECONDS, called_from_loops, compile_seconds, jit

_COMPILE_SECONDS = 7.0
"""What compiling them costs, once on a machine: numba keeps the machine code on disk."""

_CALL_SECONDS = 1e-4
"""The compiled loops, once they are loaded."""

MAX, MEET, PACE = range(3)
"""Kinds of instructions of a walk (`schedc.step.walk`)."""

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives the compiled form of a loop, each once."""

_loaded: list[Compile | None] = []
_left_to_numpy = [0.0]


def kernels(numpy_seconds: float) -> Compile | None:
    """What compiles loops, if they are worth it for work that is done without in about ``numpy_seconds`` seconds.

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
def load() -> Compile | None:
    """What compiles loops, None without numba. The machine code is kept on disk where a folder can be written."""
    compiled = jit()
    if compiled:
        called_from_loops(meet)
    return compiled


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


def one_column(op: Any, first: Any, source: Any, lag: Any, add: Any, lags: Any, adds: Any, value: Any) -> None:
    """Runs a walk under one column: arrays, or lists where the loop is interpreted. A MEET is of one rank.

    value: [n + 1], filled in but for the last, which is 0.
    """
    for i in range(len(op)):
        low, high = first[i], first[i + 1]
        time = value[source[low]] + lags[lag[low]]
        for j in range(low + 1, high):
            if lag[j] >= 0:
                other = value[source[j]] + lags[lag[j]]
                time = other if other > time else time
        own = add[i]
        if op[i] == 2:  # PACE. Lanes were started before, so that each is busy until its end, and a round ends one.
            left = adds[own]
            while True:
                pace, until = 1.0, np.inf
                for j in range(low + 1, high):
                    if lag[j] < 0 and lags[~lag[j]] > 0 and value[source[j]] > time:
                        pace += lags[~lag[j]]
                        until = min(until, value[source[j]])
                if until - time >= left * pace:
                    break
                left -= (until - time) / pace
                time = until
            time += left * pace
        elif own >= 0 and op[i] == 0:
            time += adds[own]
        value[i] = time


def lower_closed(
    order: Any, previous: Any, producers: Any, remote: Any, latency: int, end: Any, first: Any, source: Any, lag: Any
) -> None:
    """Lowers closed cells, one instruction for each, in their ``order``; see `schedc.step.lowering.closed_cells`.

    latency: row of lags of a message. Filled in: end [cells] their instructions; first [cells + 1], 0 before, and
    source and lag [inputs] of the walk.
    """
    inputs = 0
    for i in range(order.size):
        cell = order[i]
        end[cell] = i
        source[inputs], lag[inputs] = end[previous[cell]] if previous[cell] >= 0 else -1, 0
        inputs += 1
        for row in range(2):
            if remote[row, cell]:
                source[inputs], lag[inputs] = end[producers[row, cell]], latency
                inputs += 1
        first[i + 1] = inputs


def chains(first: Any, source: Any, level: Any) -> None:
    """Fills ``level``, [n]: the longest chain of instructions before each."""
    for i in range(len(level)):
        longest = 0
        for j in range(first[i], first[i + 1]):
            if source[j] >= 0 and level[source[j]] >= longest:
                longest = level[source[j]] + 1
        level[i] = longest


def assign_rows(first: Any, source: Any, last: Any, out: Any) -> int:
    """Fills ``out``, [n], with a row for each value until its last reader; gives the number of rows.

    last: [n] the last input that reads each instruction, -1 where none does. Row 0 is left out. An instruction takes
    the row of its first input, if it is the last to read it. No other input's row is written by its reader.
    """
    free = np.empty(out.size, np.int64)
    count, rows = 0, 1
    for i in range(out.size):
        low, high = first[i], first[i + 1]
        if source[low] >= 0 and last[source[low]] == low:
            out[i] = out[source[low]]
            low += 1
        elif count:
            count -= 1
            out[i] = free[count]
        else:
            out[i] = rows
            rows += 1
        for j in range(low, high):
            if source[j] >= 0 and last[source[j]] == j:
                free[count] = out[source[j]]
                count += 1
        if last[i] < 0:
            free[count] = out[i]
            count += 1
    return rows


def meet(time: Any, sets: Any, out: Any) -> None:
    """Fills ``out``, [K], with the latest time in the set of each column. time, sets: [K]."""
    latest = np.full(time.size, -np.inf)
    for k in range(time.size):
        latest[sets[k]] = max(latest[sets[k]], time[k])
    for k in range(time.size):
        out[k] = latest[sets[k]]


def run_columns(
    op: Any, first: Any, source: Any, lag: Any, add: Any, out: Any, watch: Any, lags: Any, adds: Any, sets: Any,
    value: Any, answer: Any,
) -> None:  # fmt: skip
    """Runs a walk under K columns, as many at a time as ``value`` is wide. A MAX has one input to three.

    source: [m], out: [n] rows of inputs and values; watch: [n] row of the answer, or -1. Filled in: answer [watched,
    K]. value: [rows, width] work space; row 0 is zero. A value that takes the row of its first input has its own loop:
    else the compiler does not vectorize.
    """
    width = value.shape[1]
    later, more = np.zeros((lags.shape[0], width)), np.zeros((adds.shape[0] + 1, width))
    for begin in range(0, answer.shape[1], width):
        count = min(width, answer.shape[1] - begin)
        np.positive(lags[:, begin : begin + count], later[:, :count])  # assigning slices takes four times the compiling
        np.positive(adds[:, begin : begin + count], more[:-1, :count])
        for i in range(op.size):
            low, high, r, d = first[i], first[i + 1], out[i], add[i]
            p, f = source[low], lag[low]
            if op[i] == 1:
                meet(value[p, :count], sets[d], value[r])
            elif high - low == 1 and f == 0 and r == p:
                for k in range(count):
                    value[r, k] += more[d, k]
            elif high - low == 1:
                for k in range(count):
                    value[r, k] = value[p, k] + later[f, k] + more[d, k]
            elif high - low == 2:
                q, g = source[low + 1], lag[low + 1]
                if r == p:
                    for k in range(count):
                        a, b = value[r, k] + later[f, k], value[q, k] + later[g, k]
                        value[r, k] = (a if a > b else b) + more[d, k]
                else:
                    for k in range(count):
                        a, b = value[p, k] + later[f, k], value[q, k] + later[g, k]
                        value[r, k] = (a if a > b else b) + more[d, k]
            else:
                q, g, u, h = source[low + 1], lag[low + 1], source[low + 2], lag[low + 2]
                if r == p:
                    for k in range(count):
                        a, b, c = value[r, k] + later[f, k], value[q, k] + later[g, k], value[u, k] + later[h, k]
                        value[r, k] = max(a, b if b > c else c) + more[d, k]
                else:
                    for k in range(count):
                        a, b, c = value[p, k] + later[f, k], value[q, k] + later[g, k], value[u, k] + later[h, k]
                        value[r, k] = max(a, b if b > c else c) + more[d, k]
            if watch[i] >= 0:
                np.positive(value[r, :count], answer[watch[i], begin : begin + count])
