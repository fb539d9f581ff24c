"""The walk: a table of instructions that gives every time of a step, for many costs or many ranks side by side.

An instruction is the latest of earlier ones, each with a lag, plus a time of its own:

    MAX   value[i, k] = max over inputs j of (value[source j, k] + lags[lag j, k])  +  adds[add i, k]
    MEET  value[i, k] = max of value[source, l] over the columns l in the set of column k
    PACE  a MAX of one column, whose own time runs slower while lanes of works are busy

Cells, messages, exchanges and works are lowered to it (`schedc.step.lowering`). A loop of `schedc.step.numba_kernels`
runs it, or numpy level by level; both give the same bits. Rounding is monotone: max(a, b) + d = max(a + d, b + d).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Floats, Int8, Int32, Int64, as_index, reduceat
from schedc.step.numba_kernels import MEET, PACE, assign_rows, chains, kernels, one_column, run_columns

_WIDTH = 256
"""Columns that the compiled loop runs at a time: the rows that it reads and writes then stay in the caches."""

_IN_CACHE, _IN_MEMORY, _LEAST_WIDTH = 1 << 20, 1 << 25, 32
"""Instructions times columns that numpy's way holds at a time: so many that levels are wide, and at most."""

_WIDE = 8
"""Instructions of a level from which numpy runs one column sooner than Python does."""

_NUMPY_OPS, _NUMPY_LEVEL, _PYTHON = 2e8, 3e-6, 4e-7
"""Instructions per second of numpy's way, seconds for each one's share of a level, and seconds of one in Python.

They decide, roughly, whether to load the compiled loops.
"""

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Walk:
    """n instructions in an order in which each comes after its inputs. It follows from an order, not from costs.

    op: [n] MAX, MEET or PACE. first: [n + 1] instruction i has the inputs first[i] ..< first[i + 1].
    source: [m] an earlier instruction; -1: time 0. lag: [m] row of lags; row 0 is zero. A PACE has inputs ~row too:
    ends of lanes of works. Such a row says how much more a cell takes while its lane is busy.
    add: [n] row of adds, -1: none; of a MEET a row of sets. A MEET has one input, without a lag.
    """

    op: Int8
    first: Int32
    source: Int32
    lag: Int32
    add: Int32
    start: Int64 | None = None
    """[levels + 1] where the levels of an order begin, if its instructions stand level by level; None if not."""

    def __len__(self) -> int:
        return int(self.op.size)

    @cached_property
    def rows(self) -> tuple[Int32, Int32, int]:
        """[n] the row of each value until its last reader, [m] the rows of inputs, and their number. Row 0 is zero."""
        last = np.full(len(self) + 1, -1)
        last[self.source] = np.arange(self.source.size)  # ascending: the last assignment wins
        out = np.empty(len(self), np.int32)
        loops = kernels(np.inf)
        rows = (loops(assign_rows) if loops else assign_rows)(self.first, self.source, last[:-1], out)
        return out, np.append(out, np.int32(0))[self.source], int(rows)

    @cached_property
    def levels(self) -> InputLevels:
        """The instructions level by level, as numpy runs them: by the levels of the order, or the chains of inputs."""
        if self.start is not None:
            return InputLevels.of(self, np.arange(len(self)), self.start)
        loops = kernels(len(self) * _PYTHON)
        if loops:
            level = np.empty(len(self), np.int32)
            loops(chains)(self.first, self.source, level)
        else:
            lengths = [0] * len(self)
            chains(self.first.tolist(), self.source.tolist(), lengths)
            level = np.array(lengths, np.int32)
        order = np.argsort(level, kind="stable")
        start = np.flatnonzero(np.diff(level[order], prepend=-1, append=-1)) if order.size else np.zeros(1, np.int64)
        return InputLevels.of(self, order, start)


@dataclass(frozen=True, eq=False)
class InputLevels:
    """The instructions of a walk level by level.

    order: [n]; start: [levels + 1]; width: [levels] the most inputs of an instruction.
    source, lag: [width][n] inputs in this order; an instruction with fewer repeats its first. late: [levels] whether
    some have a lag.
    """

    order: Int64
    start: Int64
    width: list[int]
    source: npt.NDArray[np.intp]
    lag: npt.NDArray[np.intp]
    late: list[bool]

    @classmethod
    def of(cls, walk: Walk, order: Int64, start: Int64) -> InputLevels:
        count = np.diff(walk.first)[order]
        column = np.arange(count.max(initial=0))[:, None]
        place = walk.first[:-1][order] + np.where(column < count, column, 0)
        width = reduceat(np.maximum, count, start[:-1]).tolist() if order.size else []
        source, lag = as_index(walk.source[place]), as_index(walk.lag[place])
        late = reduceat(np.logical_or, np.asarray(lag.any(axis=0)), start[:-1]).tolist() if order.size else []
        return cls(order, start, width, source, lag, late)


def run(
    walk: Walk,
    lags: Numbers,
    adds: Numbers,
    *,
    add: Int32 | None = None,
    sets: Int32 | None = None,
    watch: Int64 | Int32 | None = None,
) -> Numbers:
    """[n or watched, K] the values of all instructions, or of those to watch, each asked for once.

    lags: [lag rows, K], the first row zero; adds: [add rows, K]. add: [n] rows of adds, in place of the walk's own.
    sets: [set rows, K] the set of each column, for MEET; the columns are then ranks that run in step, and not costs.
    Integers (arrays of Python's, one column) give exact times of any size.
    """
    add = walk.add if add is None else add
    total = adds.shape[1]
    if total == 1 and sets is None:
        value = _one(walk, lags[:, 0], adds[:, 0], add)[:, None]
        return value if watch is None else value[watch]
    if (walk.op == PACE).any():
        raise CompilerBug("walk", "works slow compute down under many costs")
    watch = np.arange(len(walk)) if watch is None else watch
    answer = np.zeros((watch.size, total))
    size = max(1, len(walk))
    width = max(1, min(max(_LEAST_WIDTH, _IN_CACHE // size), _IN_MEMORY // size)) if sets is None else total
    turns = -(-total // max(1, width))
    if loops := kernels(size * (total / _NUMPY_OPS + turns * _NUMPY_LEVEL)):
        out, where, rows = walk.rows
        place = np.full(len(walk), -1, np.int32)
        place[watch] = np.arange(watch.size)
        value = np.zeros((rows, min(_WIDTH, total) if sets is None else total))
        groups = np.zeros((1, 1), np.int32) if sets is None else sets
        tables = (np.ascontiguousarray(table, np.float64) for table in (lags, adds))
        loops(run_columns)(walk.op, walk.first, where, walk.lag, add, out, place, *tables, groups, value, answer)
        return answer
    for low in range(0, total, max(1, width)):
        part = slice(low, low + width)
        answer[:, part] = _by_level(walk, lags[:, part], adds[:, part], add, sets)[watch]
    return answer


def _one(walk: Walk, lags: Numbers, adds: Numbers, add: Int32) -> Numbers:
    """[n] values of one column, of floats or of Python's integers."""
    exact = adds.dtype == object
    wide = walk.start is not None and len(walk) >= _WIDE * walk.start.size
    if not exact and (loops := kernels(len(walk) * _PYTHON)):
        value = np.zeros(len(walk) + 1)
        floats = (np.ascontiguousarray(table, np.float64) for table in (lags, adds))
        loops(one_column)(walk.op, walk.first, walk.source, walk.lag, add, *floats, value)
        return value[:-1]
    if wide and not exact:
        return _by_level(walk, lags[:, None], adds[:, None], add, None)[:, 0]
    values = [0 if exact else 0.0] * (len(walk) + 1)
    columns = (walk.op, walk.first, walk.source, walk.lag, add, lags, adds)
    one_column(*(column.tolist() for column in columns), values)  # type: ignore[call-arg]
    return np.array(values[:-1], adds.dtype)


def _by_level(walk: Walk, lags: Floats, adds: Floats, add: Int32, sets: Int32 | None) -> Floats:
    """[n, K] what the compiled loop does, level by level."""
    levels = walk.levels
    value = np.zeros((len(walk) + 1, adds.shape[1]))
    more = np.concatenate([adds, np.zeros((1, adds.shape[1]))])
    own, meets = add[levels.order], walk.op[levels.order] == MEET
    together = np.zeros(0, bool) if sets is None else sets[:, :, None] == sets[:, None, :]
    late = levels.late if lags.any() else [False] * len(levels.late)
    for number, (low, high) in enumerate(pairwise(levels.start.tolist())):
        time = value.take(levels.source[0, low:high], axis=0)
        if late[number]:
            time += lags.take(levels.lag[0, low:high], axis=0)
        for column in range(1, levels.width[number]):
            other = value.take(levels.source[column, low:high], axis=0)
            if late[number]:
                other += lags.take(levels.lag[column, low:high], axis=0)
            np.maximum(time, other, out=time)
        if sets is not None and meets[low:high].any():
            met = low + np.flatnonzero(meets[low:high])
            time[met - low] = np.where(together[own[met]], time[met - low, None], -np.inf).max(axis=2)
            own[met] = -1
        time += more.take(own[low:high], axis=0)
        value[levels.order[low:high]] = time
    return value[:-1]
