"""Lowers the cells of an order to instructions of a walk: a form says what a cell becomes, whatever its costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Int8, Int32, Int64, as_index
from schedc.step.dependencies import Dependencies
from schedc.step.kept import kept
from schedc.step.numba_kernels import MAX, MEET, PACE, kernels, lower_closed
from schedc.step.walk import Walk

if TYPE_CHECKING:
    from schedc.step.work_lowering import Gaps

FREE, INPUT, GRADIENT, FAR_INPUT, FAR_GRADIENT = range(-1, -6, -1)
"""Inputs from outside a cell: the rank is free; the message of the forward, and of the backward, is there.

The FAR inputs leave out messages of the same rank. If cells send at their ends, such a message is never late.
"""

_ABSENT = -2
_MOST = 3
"""Inputs of an instruction of a cell at most, but for lanes of works."""

LATENCY = 1
"""The row of lags of a message between ranks."""

_NUMPY_CELL = 1e-7
"""Seconds in which numpy lowers a cell, roughly: what decides whether to load the compiled loop."""


class CellInstruction(NamedTuple):
    """An instruction of a form. inputs: (step of the form or one of the above, row of lags from the cell's first on).

    add: row of adds, from the cell's first on; -1: none.
    """

    op: int
    inputs: tuple[tuple[int, int], ...]
    add: int = -1


class CellInstructions(NamedTuple):
    """The instructions of a cell. outs: the steps of its end, of the output of its forward, and of its gradient."""

    steps: tuple[CellInstruction, ...]
    outs: tuple[int, int, int]


CLOSED = CellInstructions((CellInstruction(MAX, ((FREE, 0), (FAR_INPUT, 0), (FAR_GRADIENT, 0)), 0),), (0, 0, 0))
"""A cell that begins when all its messages are there, and sends at its end."""
PACED = CellInstructions((CLOSED.steps[0]._replace(op=PACE),), CLOSED.outs)
"""A closed cell that works slow down."""


@dataclass(frozen=True, eq=False)
class Lowered:
    """The instructions of an order; -1: time 0.

    base: [cells] the first of each. outs: [3, cells] those of the end of each cell, of its output, and of its gradient.
    reached: [cells] that of the rank's clock in front of each cell. closed: [P] that of the end of each rank.
    """

    walk: Walk
    base: Int32
    outs: Int32
    reached: Int32
    closed: Int32

    @property
    def end(self) -> Int32:
        """[cells] the instruction of the end of each cell."""
        end: Int32 = self.outs[0]
        return end


def lower(
    dependencies: Dependencies,
    forms: Sequence[CellInstructions],
    form: Int64 | Int8,
    lag_row: Int32 | int = 0,
    add_row: Int32 | int = 0,
    gaps: Gaps | None = None,
    works_row: int = 0,
    disturbing: Sequence[int] = (),
) -> Lowered:
    """The walk of an order whose cells have forms. form: [cells] index into ``forms``.

    lag_row, add_row: [cells] first row of lags and of adds of each cell. Lags that are 0 in the form stay 0.
    gaps: those of works beside the cells; works_row: the row of adds of the first. disturbing: lanes of works that slow
    every PACE down. Their rows of lags follow the row of a message.
    """
    lowering = _Lowering(dependencies, forms, form, gaps, _MOST + len(disturbing))
    lowering.cells(forms, form, np.broadcast_to(lag_row, form.size), np.broadcast_to(add_row, form.size))
    if gaps is not None:
        starts = gaps.number[gaps.start]
        lowering.add[starts] = works_row + np.arange(starts.size)
        for own, other in ((gaps.start, gaps.lanes), (gaps.join, starts)):
            lowering.put(0, gaps.number[own], gaps.clock[own], 0)
            lowering.put(1, gaps.number[own], other, 0)
        for number, lane in enumerate(disturbing):
            lowering.put(_MOST + number, lowering.outs[0], gaps.busy(lane), ~(LATENCY + 1 + number))
    return Lowered(lowering.walk(), lowering.base, lowering.outs, lowering.reached, lowering.closed)


class _Lowering:
    """The instructions of an order while they are found. source, lag: [inputs, n]; the rest is as in `Lowered`."""

    def __init__(
        self,
        dependencies: Dependencies,
        forms: Sequence[CellInstructions],
        form: Int64 | Int8,
        gaps: Gaps | None,
        most: int,
    ) -> None:
        levels, cells = dependencies.levels, len(dependencies)
        if levels.stuck.size:
            raise CompilerBug("timeline", f"a schedule with a deadlock, at cells {levels.stuck[:4]}")
        steps = np.array([len(each.steps) for each in forms], np.int32)[form]
        size = steps if gaps is None else steps + gaps.counts
        ends = np.cumsum(size[levels.order], dtype=np.int32)
        self.base = np.empty(cells, np.int32)
        self.base[levels.order] = ends - steps[levels.order]
        self.outs = self.base + np.array([each.outs for each in forms], np.int32).T.take(as_index(form), axis=1)
        self.dependencies, total = dependencies, int(ends[-1]) if cells else 0
        ends, start = np.append(self.outs[0], np.int32(-1)), dependencies.rank_start
        self.reached = ends[dependencies.previous]
        self.closed = np.where(start[:-1] < start[1:], ends[start[1:] - 1], np.int32(-1))
        if gaps is not None:
            gaps.lower(self.base + steps - size, self.outs[0], total)
            gaps.move_clocks(self.reached, self.closed)
            total += int(gaps.closing.sum())
        self.source, self.lag = np.full((most, total), _ABSENT, np.int32), np.zeros((most, total), np.int32)
        self.op, self.add = np.zeros(total, np.int8), np.full(total, -1, np.int32)

    def cells(self, forms: Sequence[CellInstructions], form: Int64 | Int8, lag_row: Int32, add_row: Int32) -> None:
        """Gives the instructions of cells their inputs; arguments as for `lower`, all [cells]."""
        order = self.dependencies.levels.order
        for number, each in enumerate(forms):
            own = order if len(forms) == 1 else order[form[order] == number]
            for row, step in enumerate(each.steps):
                at = self.base[own] + row
                self.op[at] = step.op
                if step.add >= 0:
                    self.add[at] = step.add if step.op == MEET else step.add + add_row[own]
                for column, (read, late) in enumerate(step.inputs):
                    lag = late + lag_row[own] if late else 0
                    source = (self.base[own] + read, lag) if read >= 0 else self._outside(own, read, lag)
                    self.put(column, at, *source)

    def _outside(self, own: Int32, read: int, lag: Int32 | int) -> tuple[Int32, Int32 | int]:
        """[own] the instruction that cells read from outside, and its row of lags: ``lag``, or that of a message."""
        if read == FREE:
            return self.reached[own], lag
        row = 0 if read in (INPUT, FAR_INPUT) else 1
        producer, far = self.dependencies.producers[row, own], self.dependencies.remote[row, own]
        there, absent = (far, _ABSENT) if read in (FAR_INPUT, FAR_GRADIENT) else (producer >= 0, -1)
        return np.where(there, self.outs[1 + row, producer], np.int32(absent)), far * np.int32(LATENCY)

    def put(self, column: int, at: Int32, source: Int32, lag: Int32 | int) -> None:
        """Gives instructions an input. at: [n] instructions; source, lag: [n] as in `Walk`, or absent."""
        self.source[column, at], self.lag[column, at] = source, lag

    def walk(self) -> Walk:
        there = self.source != _ABSENT
        first = np.zeros(self.op.size + 1, np.int32)
        np.cumsum(np.add.reduce(there, axis=0, dtype=np.int8), out=first[1:])
        source, lag = np.empty((2, first[-1]), np.int32)
        place = first[:-1].copy()
        for column, here in enumerate(there):
            at = np.flatnonzero(here)
            source[place[at]], lag[place[at]] = self.source[column, at], self.lag[column, at]
            place += here
        level_by_level = self.op.size == self.base.size and not self.op.any()  # one MAX for each cell
        start = self.dependencies.levels.start if level_by_level else None
        return Walk(self.op, first, source, lag, self.add, start)


@kept
def closed_cells(dependencies: Dependencies) -> tuple[Walk, Int32]:
    """The walk of cells that all are closed, and [cells] the instruction of each: its value is when the cell ends.

    Rows of adds are cells; row 1 of lags is the time of a message.
    """
    cells = len(dependencies)
    if dependencies.levels.stuck.size or not (loops := kernels(cells * _NUMPY_CELL)):
        every = np.arange(cells, dtype=np.int32)
        lowered = lower(dependencies, [CLOSED], np.zeros(cells, np.int8), add_row=every)
        return lowered.walk, lowered.end
    levels, first, end = dependencies.levels, np.zeros(cells + 1, np.int32), np.empty(cells, np.int32)
    source, lag = np.empty((2, cells + np.count_nonzero(dependencies.remote)), np.int32)
    waits = dependencies.previous, dependencies.producers, dependencies.remote
    loops(lower_closed)(levels.order, *waits, LATENCY, end, first, source, lag)
    return Walk(np.zeros(cells, np.int8), first, source, lag, levels.order, levels.start), end
