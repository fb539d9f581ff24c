"""Lowers the cells of an order to instructions of a walk: a form says what a cell becomes, whatever its costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Int8, Int32, Int64
from schedc.step.dependencies import Dependencies
from schedc.step.kept import kept
from schedc.step.numba_kernels import MAX
from schedc.step.walk import Walk

FREE, INPUT, GRADIENT, FAR_INPUT, FAR_GRADIENT = range(-1, -6, -1)
"""What an instruction of a cell may read besides others of it: when the rank is free, and when the outputs that its
forward and its backward wait for arrive. The last two leave out outputs of the same rank, which are never later than
that rank is free if cells send at their ends."""

_ABSENT = -2
LATENCY = 1
"""The row of lags of a message between ranks."""


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


@dataclass(frozen=True, eq=False)
class Lowered:
    """outs: [3, cells] the instructions of the end of each cell, of its output, and of its gradient."""

    walk: Walk
    outs: Int32

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
) -> Lowered:
    """The walk of an order whose cells have forms. form: [cells] index into ``forms``.

    lag_row, add_row: [cells] first row of lags and of adds of each cell. Lags that are 0 in the form stay 0.
    """
    levels, cells = dependencies.levels, len(dependencies)
    if levels.stuck.size:
        raise CompilerBug("timeline", f"a schedule with a deadlock, at cells {levels.stuck[:4]}")
    size = np.array([len(each.steps) for each in forms], np.int32)[form[levels.order]]
    ends = np.cumsum(size, dtype=np.int32)
    base = np.empty(cells, np.int32)
    base[levels.order] = ends - size
    outs = base + np.array([each.outs for each in forms], np.int32).T.take(form, axis=1)
    inputs = Inputs(int(ends[-1]) if cells else 0, max(len(step.inputs) for each in forms for step in each.steps))
    op, add = np.zeros(inputs.total, np.int8), np.full(inputs.total, -1, np.int32)
    lag_row, add_row = np.broadcast_to(lag_row, cells), np.broadcast_to(add_row, cells)
    for number, each in enumerate(forms):
        own = levels.order if len(forms) == 1 else levels.order[form[levels.order] == number]
        for row, step in enumerate(each.steps):
            at = base[own] + row
            op[at] = step.op
            if step.add >= 0:
                add[at] = step.add + add_row[own]
            for column, (read, late) in enumerate(step.inputs):
                lag = late + lag_row[own] if late else 0
                if read >= 0:
                    inputs.put(column, at, base[own] + read, lag)
                else:
                    inputs.put(column, at, *_outside(dependencies, outs, own, read, lag))
    return Lowered(inputs.walk(op, add), outs)


class Inputs:
    """The inputs of instructions as they are found, in columns. total: instructions; most: inputs of one."""

    def __init__(self, total: int, most: int) -> None:
        self.total = total
        self.source, self.lag = np.full((most, total), _ABSENT, np.int32), np.zeros((most, total), np.int32)

    def put(self, column: int, at: Int32, source: Int32, lag: Int32 | int) -> None:
        """Gives instructions an input. at: [n] instructions; source, lag: [n] as in `Walk`, or absent."""
        self.source[column, at], self.lag[column, at] = source, lag

    def walk(self, op: Int8, add: Int32) -> Walk:
        """The walk of these inputs. op, add: [total] as there."""
        there = self.source != _ABSENT
        first = np.zeros(self.total + 1, np.int64)
        np.cumsum(np.add.reduce(there, axis=0, dtype=np.int8), out=first[1:])
        source, lag = np.empty((2, first[-1]), np.int32)
        place = first[:-1].copy()
        for column, here in enumerate(there):
            at = np.flatnonzero(here)
            source[place[at]], lag[place[at]] = self.source[column, at], self.lag[column, at]
            place += here
        return Walk(op, first, source, lag, add)


def _outside(
    dependencies: Dependencies, outs: Int32, own: Int32, read: int, lag: Int32 | int
) -> tuple[Int32, Int32 | int]:
    """[own] the instruction that cells read from outside, and its row of lags: ``lag``, or that of a message."""
    if read == FREE:
        before = dependencies.previous[own]
        return np.where(before >= 0, outs[0, before], np.int32(-1)), lag
    row = 0 if read in (INPUT, FAR_INPUT) else 1
    producer, far = dependencies.producers[row, own], dependencies.remote[row, own]
    there, absent = (far, _ABSENT) if read in (FAR_INPUT, FAR_GRADIENT) else (producer >= 0, -1)
    return np.where(there, outs[1 + row, producer], np.int32(absent)), far * np.int32(LATENCY)


@kept
def closed_cells(dependencies: Dependencies) -> Lowered:
    """The walk of cells that all are closed. Rows of adds are cells; row 1 of lags is the time of a message."""
    cells = np.arange(len(dependencies), dtype=np.int32)
    return lower(dependencies, [CLOSED], np.zeros(cells.size, np.int8), add_row=cells)
