"""Steps below which no order inside the cells brings a schedule, under many costs at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.costs import CellCosts
from schedc.cell.delays import lower_bound_delays
from schedc.cell.graph import StageShape
from schedc.ir.arrays import Floats, Int64
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
    cells = cell_forms(dependencies, tuple(shapes), tuple(recomputed or shapes))
    return floors(dependencies, cells.forms, cells.form, batch, np.zeros(len(batch)) if p2p is None else p2p)


def floors(
    dependencies: Dependencies, cells: Sequence[CellForm], cell: Int64, costs: CellCostBatch, p2p: Floats
) -> Floats:
    """[K] the least makespans of any programs of the cells, under K costs; ``p2p`` and unit as for `floor_batch`.

    cell: [cells of the schedule] index into ``cells``.
    """
    bounds = [lower_bound_delays(each.kind, each.forward, each.backward, costs) for each in cells]
    return message_makespans(dependencies, cell, np.array(bounds).reshape(-1, 3, 3, len(costs)), p2p)
