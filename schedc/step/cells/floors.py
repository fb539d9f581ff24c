"""Steps below which no order inside the cells brings a schedule, under many costs at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedc.cell.bounds import delay_bounds
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts
from schedc.cell.graph import StageShape
from schedc.cell.tasks import tasks_of
from schedc.ir.arrays import Floats
from schedc.step.cells.cell_forms import CellForm, cell_forms
from schedc.step.dependencies import Dependencies
from schedc.step.messages import message_makespans


def floor_batch(
    dependencies: Dependencies,
    shapes: Sequence[StageShape],
    costs: CellCostBatch | Sequence[CellCosts],
    p2p: Floats | None = None,
    recomputed: Sequence[StageShape] | None = None,
) -> Floats:
    """[K] ``floor`` of `schedc.step.cells.cell_pricing.price` for each of K costs, to the last digit.

    shapes, recomputed: [stages] graphs, as there. costs: of segments and exchanges, all with the same names.
    p2p: [K] latency of a message between ranks, by default 0. All times, and the floors, are in one unit.
    """
    batch = costs if isinstance(costs, CellCostBatch) else CellCostBatch.of(costs)
    known = cell_forms(dependencies, tuple(shapes), tuple(recomputed or shapes))
    delay = np.empty((len(known.forms), 3, 3, len(batch)))
    for of, form in zip(delay, known.forms, strict=True):
        of[:] = form_bounds(form, batch)
    latency = np.zeros(len(batch)) if p2p is None else p2p
    return message_makespans(dependencies, known.form, delay, latency)


def form_bounds(form: CellForm, costs: CellCostBatch) -> Floats:
    """[3, 3, K] lower bounds of the delays of cells of one form, whatever their program, in the unit of the costs."""
    tasks = tasks_of(form.kind, form.forward, form.backward)
    return delay_bounds(tasks, costs.durations(tasks))
