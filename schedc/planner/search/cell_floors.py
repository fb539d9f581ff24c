"""Floors of plans whose exchanges run beside compute: no order inside the cells brings their pipeline below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from schedc.analysis.cell_forms import CellForm, cell_forms
from schedc.analysis.dependencies import Dependencies
from schedc.analysis.floors import form_bounds
from schedc.analysis.message_batch import simulate_messages_batch
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.graph import StageShape
from schedc.ir.arrays import Floats
from schedc.plan.price_cells import stage_graphs
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import read_back


@dataclass(frozen=True, eq=False)
class CellFloors:
    """Graphs of stages and bounds of cells that plans of a search share, each made once.

    graphs: [stages] by what they follow from. costs: of all splits whose exchanges take the same lanes. bounds:
    [3, 3, splits] delays of a form of cells under these costs, as in `schedc.cell.delays`.
    """

    graphs: dict[tuple[object, ...], tuple[StageShape, ...]] = field(default_factory=dict)
    costs: dict[CostsKey, AlikeCosts] = field(default_factory=dict)
    bounds: dict[tuple[object, ...], Floats] = field(default_factory=dict)

    def of(self, plans: Sequence[PlannedStep], order: Dependencies) -> Floats:
        """[plans] seconds that the pipelines of plans of one order take at least. Raises `DiagnosticError` as `price`.

        The floors are those of `schedc.analysis.floors.floor_batch`.
        """
        floors = np.empty(len(plans))
        groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for number, planned in enumerate(plans):
            groups[_graphs_key(planned)].append(number)
        for key, numbers in groups.items():
            alike = [plans[number] for number in numbers]
            if key not in self.graphs:
                self.graphs[key] = _graphs_of(alike[0])
            floors[numbers] = self._of_one_graph(alike, order, self.graphs[key])
        return floors

    def _of_one_graph(
        self, plans: Sequence[PlannedStep], order: Dependencies, graphs: tuple[StageShape, ...]
    ) -> Floats:
        table, rows = plans[0].table, [planned.row for planned in plans]
        key = CostsKey(plans[0].split.alltoall, *_lanes(plans[0]), plans[0].choice.splits)
        if key not in self.costs:
            self.costs[key] = AlikeCosts.of(table, key)
        columns = [self.costs[key].column[row] for row in rows]
        known = cell_forms(order, graphs, graphs)
        delay = np.stack([self._bound(key, form)[:, :, columns] for form in known.forms])
        return simulate_messages_batch(order, known.form, delay, table.p2p[rows]).makespan

    def _bound(self, key: CostsKey, form: CellForm) -> Floats:
        cell = (key, form.kind, form.forward, form.backward)
        if cell not in self.bounds:
            self.bounds[cell] = form_bounds(form, self.costs[key].batch)
        return self.bounds[cell]


class CostsKey(NamedTuple):
    """What splits share whose costs have the same names: their method, the links it takes, split backwards."""

    alltoall: str
    rail: bool
    node: bool
    splits: bool


class AlikeCosts(NamedTuple):
    """The costs of all splits of a key. column: of a row of the table in the batch."""

    batch: CellCostBatch
    column: dict[int, int]

    @classmethod
    def of(cls, table: PartTable, key: CostsKey) -> AlikeCosts:
        rows = [
            row
            for row, split in enumerate(table.splits)
            if (split.alltoall, bool(table.rail[row]), bool(table.node[row])) == key[:3]
        ]
        batch = CellCostBatch.of([table.cell_costs(row, key.splits) for row in rows])
        return cls(batch, {row: column for column, row in enumerate(rows)})


def _lanes(planned: PlannedStep) -> tuple[bool, bool]:
    return bool(planned.table.rail[planned.row]), bool(planned.table.node[planned.row])


def _graphs_key(planned: PlannedStep) -> tuple[object, ...]:
    """Equal for plans whose stages have the same graphs and whose exchanges take the same lanes."""
    axes = planned.axes
    placed = planned.levels.tobytes() if axes.where != "all" else b""
    return axes.recompute, placed, axes.alltoall, planned.layout, *_lanes(planned)


def _graphs_of(planned: PlannedStep) -> tuple[StageShape, ...]:
    result = read_back(planned)
    return stage_graphs(result.schedule, result.costs)[0]
