"""Times of a step whose cells run programs that are fixed beforehand, under many costs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts
from schedc.cell.delays import delay_batch
from schedc.cell.graph import QUEUES, StageShape
from schedc.cell.program import MESSAGED, Action, CellProgram, Edge
from schedc.cell.schedule import cell_program
from schedc.cell.tasks import Tasks, tasks_of
from schedc.ir.arrays import Floats, Int64
from schedc.step.cells.cell_forms import CellForms
from schedc.step.dependencies import Dependencies
from schedc.step.messages import MessageTimes, message_times
from schedc.step.numba_kernels import kernels

_NUMPY_PART = 4e-6
"""Seconds that numpy takes for a part of a program."""


@dataclass(frozen=True, eq=False)
class CodedProgram:
    """A cell program as numbers, [parts] each, for loops that numba compiles.

    action: 0 to 2 for a run, a start and a wait, of the task ``number``; 3 and 4 where the half ``number`` opens, and
    where it is complete. queue: of the task.
    """

    action: Int64
    number: Int64
    queue: Int64

    @classmethod
    def of(cls, program: CellProgram, tasks: Tasks) -> CodedProgram:
        """tasks: those of the program's cell."""
        rows = []
        for part in program.parts:
            if isinstance(part, Edge):
                rows.append((3 if part.opens else 4, MESSAGED.index(part.half), 0))
            else:
                task = tasks.number[part.half, part.node]
                rows.append((_ACTIONS.index(part.action), task, tasks.queues[task]))
        return cls(*np.array(rows, np.int64).reshape(-1, 3).T.copy())


_ACTIONS = (Action.RUN, Action.START, Action.WAIT)


def cell_delays(action: Any, number: Any, queue: Any, queues: int, duration: Any, out: Any) -> None:
    """Fills ``out``, [3, 3, K], with the delays of a cell program: `schedc.cell.delays.delay_batch` by a loop.

    action, number, queue: [parts] those of `CodedProgram`. duration: [tasks, K].
    """
    ends, free = np.empty(duration.shape[0]), np.empty(queues)
    message, complete, sent = np.empty(2), np.empty(2), np.empty(2, np.bool_)
    for k in range(duration.shape[1]):
        for arrival in range(3):
            clock = 0.0 if arrival == 0 else -np.inf
            free[:], message[:], sent[:] = -np.inf, -np.inf, False
            if arrival:
                message[arrival - 1] = 0.0
            for i in range(action.size):
                at = number[i]
                if action[i] == 0:
                    clock += duration[at, k]
                elif action[i] == 1:
                    ends[at] = free[queue[i]] = max(clock, free[queue[i]]) + duration[at, k]
                elif action[i] == 2:
                    clock = max(clock, ends[at])
                elif action[i] == 3:
                    clock = max(clock, message[at])
                else:
                    complete[at], sent[at] = clock, True
            out[0, arrival, k] = clock
            for half in range(2):
                out[1 + half, arrival, k] = complete[half] if sent[half] else clock


@dataclass(frozen=True, eq=False)
class _FixedProgram:
    program: CellProgram
    tasks: Tasks

    @cached_property
    def coded(self) -> CodedProgram:
        return CodedProgram.of(self.program, self.tasks)

    def delays(self, duration: Floats) -> Floats:
        """[3, 3, K] delays. duration: [tasks, K]."""
        loops = kernels(len(self.program.parts) * _NUMPY_PART)
        if not loops:
            return delay_batch(self.program, self.tasks, duration)
        code, out = self.coded, np.empty((3, 3, duration.shape[1]))
        loops(cell_delays)(code.action, code.number, code.queue, len(QUEUES), duration, out)
        return out


@dataclass(frozen=True, eq=False)
class FixedPrograms:
    """An order whose cells all run the programs that are found under one of several costs.

    programs: by form of cells, and by those costs.
    """

    dependencies: Dependencies
    cells: CellForms
    programs: tuple[tuple[_FixedProgram, ...], ...]

    @classmethod
    def of(cls, dependencies: Dependencies, cells: CellForms, ordered_by: Sequence[CellCosts]) -> FixedPrograms:
        """The programs of the cells of an order."""

        def programs(kind: str, forward: StageShape | None, backward: StageShape | None) -> tuple[_FixedProgram, ...]:
            tasks = tasks_of(kind, forward, backward)
            return tuple(_FixedProgram(cell_program(kind, forward, backward, each), tasks) for each in ordered_by)

        return cls(dependencies, cells, tuple(programs(form.kind, form.forward, form.backward) for form in cells.forms))

    def times(self, costs: CellCostBatch, p2p: Floats) -> MessageTimes:
        """[programs, K] times of a step under K costs. No step gets longer where a time of its costs falls.

        `schedc.step.cells.cell_pricing.price` gives the same ``late_wait``, but for rounding.
        costs: with the same names. p2p: [K] latency of a message. All in one unit.
        """
        K, number = len(costs), len(self.programs[0])
        delay = np.empty((len(self.programs), 3, 3, number * K))
        for form, programs in enumerate(self.programs):
            duration = costs.durations(programs[0].tasks)
            for place, program in enumerate(programs):
                delay[form, ..., place * K : (place + 1) * K] = program.delays(duration)
        makespan, span = message_times(self.dependencies, self.cells.form, delay, np.tile(p2p, number))
        return MessageTimes(makespan.reshape(-1, K), span.reshape(-1, K))
