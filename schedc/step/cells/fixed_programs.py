"""Times of a step whose cells run programs that are fixed beforehand, under many costs at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts
from schedc.cell.delays import delay_batch
from schedc.cell.schedule import cell_program
from schedc.cell.tasks import tasks_of
from schedc.ir.arrays import Floats
from schedc.step.cells.cell_forms import CellForms
from schedc.step.dependencies import Dependencies
from schedc.step.messages import MessageTimes, message_times


def fixed_program_times(
    dependencies: Dependencies, cells: CellForms, costs: CellCostBatch, p2p: Floats, ordered_by: Sequence[CellCosts]
) -> MessageTimes:
    """[programs, K] times of a step whose cells all run the programs that are found under one of ``ordered_by``.

    No step gets longer where a time of its costs falls. `schedc.step.cells.cell_pricing.price` gives the same
    ``late_wait``, but for rounding.
    costs: K of them, with the same names. p2p: [K] latency of a message. All in one unit.
    """
    K = len(costs)
    delay = np.empty((len(cells.forms), 3, 3, len(ordered_by) * K))
    for number, form in enumerate(cells.forms):
        tasks = tasks_of(form.kind, form.forward, form.backward)
        duration = costs.durations(tasks)
        for place, times in enumerate(ordered_by):
            program = cell_program(form.kind, form.forward, form.backward, times)
            delay[number, ..., place * K : (place + 1) * K] = delay_batch(program, tasks, duration)
    makespan, span = message_times(dependencies, cells.form, delay, np.tile(p2p, len(ordered_by)))
    return MessageTimes(makespan.reshape(-1, K), span.reshape(-1, K))
