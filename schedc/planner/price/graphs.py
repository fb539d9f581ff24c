"""The graphs of the stages of a plan, as the compiler makes them of the plan's files."""

from __future__ import annotations

from dataclasses import replace

from schedc.cell.graph import StageShape
from schedc.cell.table import CellTable
from schedc.ir.plan import Recompute
from schedc.plan.price_cells import with_layout
from schedc.plan.recomputed_nodes import graphs_of
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import LEVELS, split_directives


def planned_graphs(planned: PlannedStep) -> tuple[tuple[StageShape, ...], tuple[StageShape, ...]]:
    """[stages] each: graphs with the nodes that backwards recompute, and those that an R runs.

    They are those of `schedc.plan.recomputed_nodes.graphs_of`.
    """
    costs = planned.table.cell_costs(planned.row, planned.choice.splits)
    table = with_layout(CellTable(costs, method=planned.axes.alltoall), planned.layout)
    sizes = split_directives(planned.problem, planned.axes.split).plan
    levels = tuple(Recompute(LEVELS[level]) for level in planned.levels.tolist())
    return graphs_of(table.shapes(planned.placement.stages), replace(sizes, recompute=levels))
