"""Floors of plans whose exchanges run beside compute: no order inside the cells brings their pipeline below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from schedc.cell.bounds import OpBounds, delays_of
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.graph import StageShape
from schedc.cell.tasks import tasks_of
from schedc.ir.arrays import Floats
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import PartTable
from schedc.step.cells.cell_forms import OpOnStage, stage_forms
from schedc.step.dependencies import Dependencies
from schedc.step.messages import message_makespans


@dataclass(frozen=True, eq=False)
class CellFloors:
    """Graphs of stages and bounds of cells that plans of a search share, each made once.

    graphs: [stages] by the facts behind them. costs: of all splits whose exchanges take the same lanes. ops: bounds of
    an op on a graph under these costs. bounds: [3, 3, splits] delays of the cells of one op or two.
    """

    graphs: dict[tuple[object, ...], tuple[StageShape, ...]] = field(default_factory=dict)
    costs: dict[CostsKey, AlikeCosts] = field(default_factory=dict)
    ops: dict[OpKey, OpBounds] = field(default_factory=dict)
    bounds: dict[tuple[OpKey, ...], Floats] = field(default_factory=dict)

    def of(self, plans: Sequence[PlannedStep], order: Dependencies) -> Floats:
        """[plans] seconds that the pipelines of plans of one order take at least.

        The floors equal `schedc.step.cells.floors.floor_batch`, but for rounding. No schedule of a plan has an R.
        """
        cells = stage_forms(order)
        delay = np.empty((len(cells.forms), 3, 3, len(plans)))
        groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for number, planned in enumerate(plans):
            groups[_graphs_key(planned)].append(number)
        for numbers in groups.values():
            alike = [plans[number] for number in numbers]
            delay[..., numbers] = self._delays(alike, cells.forms, self._graphs(alike[0]))
        p2p = plans[0].table.p2p[[planned.row for planned in plans]]
        return message_makespans(order, cells.form, delay, p2p)

    def _graphs(self, planned: PlannedStep) -> tuple[StageShape, ...]:
        if (key := _graphs_key(planned)) not in self.graphs:
            self.graphs[key] = planned.graphs[0]
        return self.graphs[key]

    def _delays(
        self, plans: Sequence[PlannedStep], forms: Sequence[Sequence[OpOnStage]], graphs: Sequence[StageShape]
    ) -> Floats:
        """[forms, 3, 3, plans] bounds of the delays of cells, of plans with the same graphs. graphs: [stages]."""
        key = _costs_key(plans[0])
        if key not in self.costs:
            self.costs[key] = AlikeCosts.of(plans[0].table, key)
        columns = [self.costs[key].column[planned.row] for planned in plans]
        numbers: dict[tuple[OpKey, ...], int] = {}
        cell = [numbers.setdefault(ops, len(numbers)) for ops in _ops_of(key, forms, graphs)]
        return np.stack([self._bound(ops)[..., columns] for ops in numbers])[cell]

    def _bound(self, ops: tuple[OpKey, ...]) -> Floats:
        if ops not in self.bounds:
            self.bounds[ops] = delays_of(*map(self._of_op, ops))
        return self.bounds[ops]

    def _of_op(self, op: OpKey) -> OpBounds:
        if op not in self.ops:
            graphs = (op.graph, None) if op.kind == "F" else (None, op.graph)
            tasks = tasks_of(op.kind, *graphs)
            self.ops[op] = OpBounds.of(tasks, self.costs[op.costs].batch.durations(tasks))
        return self.ops[op]


class CostsKey(NamedTuple):
    """The key of splits whose costs have the same names: method, links of the method, split backwards."""

    alltoall: str
    rail: bool
    node: bool
    splits: bool


class OpKey(NamedTuple):
    """An op on a graph, under the costs of a key."""

    costs: CostsKey
    kind: str
    graph: StageShape


def _ops_of(
    costs: CostsKey, forms: Sequence[Sequence[OpOnStage]], graphs: Sequence[StageShape]
) -> list[tuple[OpKey, ...]]:
    """[forms] the ops of cells on the graphs of their stages."""
    return [
        tuple(OpKey(costs, op.kind, graphs[op.stage].ready if op.ready else graphs[op.stage]) for op in form)
        for form in forms
    ]


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


def _costs_key(planned: PlannedStep) -> CostsKey:
    table, row = planned.table, planned.row
    return CostsKey(planned.axes.alltoall, bool(table.rail[row]), bool(table.node[row]), planned.choice.splits)


def _graphs_key(planned: PlannedStep) -> tuple[object, ...]:
    """Equal for plans whose stages have the same graphs and whose exchanges take the same lanes."""
    axes = planned.axes
    placed = planned.levels.tobytes() if axes.where != "all" else b""
    return axes.recompute, placed, planned.layout, *_costs_key(planned)[:3]
