"""Times of a step whose cells run programs that are fixed beforehand, under many costs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts
from schedc.cell.delays import CodedProgram, delay_batch
from schedc.cell.graph import QUEUES, StageShape
from schedc.cell.program import CellProgram
from schedc.cell.schedule import cell_program
from schedc.cell.tasks import Tasks, tasks_of
from schedc.ir.arrays import Floats
from schedc.step.cells.cell_forms import CellForms
from schedc.step.dependencies import Dependencies
from schedc.step.messages import MessageTimes, message_times
from schedc.step.numba_kernels import cell_delays, kernels

_NUMPY_PART = 4e-6
"""Seconds that numpy takes for a part of a program."""


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
