"""Floors of plans whose exchanges run beside compute: no order inside the cells brings their pipeline below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from schedc.analysis.floors import floor_batch
from schedc.compiler import price
from schedc.cost.costs import parse_costs
from schedc.inputs import open_input
from schedc.ir.arrays import Floats
from schedc.load.library import Text
from schedc.plan.price_cells import stage_graphs
from schedc.planner.price.files import PlannedStep
from schedc.source import Source

_ANY = 1e18
"""Bytes of a memory that no plan fills."""


def pipeline_floors(plans: Sequence[PlannedStep]) -> Floats:
    """[plans] seconds that the pipelines of plans of one order take at least. Raises `DiagnosticError` as `price`."""
    floors = np.empty(len(plans))
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, planned in enumerate(plans):
        groups[_graphs_key(planned)].append(number)
    for numbers in groups.values():
        floors[numbers] = _of_one_graph([plans[number] for number in numbers])
    return floors


def _graphs_key(planned: PlannedStep) -> tuple[object, ...]:
    """Equal for plans whose stages have the same graphs and whose exchanges take the same lanes."""
    axes, row = planned.axes, planned.row
    lanes = bool(planned.table.rail[row]), bool(planned.table.node[row])
    return axes.recompute, axes.where, axes.alltoall, planned.layout, lanes


def _of_one_graph(plans: Sequence[PlannedStep]) -> Floats:
    first, table = plans[0], plans[0].table
    tree = open_input(Text(Source("floor.sched", first.plan_file("floor", _ANY)), "floor"))
    result = price(tree, {}, parse_costs(Source("floor.costs.toml", first.cost_file())))
    graphs, _ = stage_graphs(result.schedule, result.costs)
    rows = [planned.row for planned in plans]
    costs = [table.cell_costs(row, first.choice.splits) for row in rows]
    return floor_batch(result.dependencies, graphs, costs, table.p2p[rows])
