"""Prices the cells of a schedule by what happens inside them: the method, orders and recomputation are the plan's."""

from __future__ import annotations

from dataclasses import replace

from schedc.analysis.cell_pricing import CellPricing, price
from schedc.analysis.dependencies import Dependencies
from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.graph import Lane, StageShape
from schedc.cell.program import PlanOrder
from schedc.cell.table import CellTable
from schedc.cost.checks import problem
from schedc.cost.costs import Costs
from schedc.diagnostics import DiagnosticError
from schedc.ir.schedule import Schedule
from schedc.layout.parts import DECODER, Layout, PartKind
from schedc.plan import Attachments, Method, plan_of
from schedc.plan.recomputed_nodes import in_backwards, in_recomputations, shares_of_forward
from schedc.plan.row_counts import chosen_method
from schedc.source import Source


def price_cells(dependencies: Dependencies, costs: Costs) -> CellPricing | None:
    """A legal schedule priced from inside; None where the costs say nothing of cells.

    How rows travel, the orders by hand, and what is recomputed are those of the plan, if the schedule has one. Raises
    `DiagnosticError` (S404) for blocks of another number of stages.
    """
    if costs.cell is None:
        return None
    schedule = dependencies.schedule
    table, orders, plan = _attached(schedule, costs.cell, costs.source)
    shapes = table.shapes(schedule.stages)
    again = in_recomputations(shapes, plan)
    return price(dependencies, in_backwards(shapes, plan), table.costs, costs.p2p, orders.get, again)


def stage_graphs(schedule: Schedule, costs: Costs) -> tuple[tuple[StageShape, ...], CellCosts]:
    """[stages] what each stage does, with what its backward does again, and the times of it.

    costs: that know of cells. Raises `DiagnosticError` (S404).
    """
    assert costs.cell is not None
    table, _, plan = _attached(schedule, costs.cell, costs.source)
    return in_backwards(table.shapes(schedule.stages), plan), table.costs


def standard_table(schedule: Schedule) -> CellTable:
    """One MoE block in every stage, without times: as experts and machine of the schedule's plan make it, else flat."""
    plan = plan_of(schedule)
    segments = {"shared": SegmentTimes(0.0)} if plan.experts and plan.experts.shared else {}
    lane = Lane.RAIL if plan.topology and plan.topology.nodes > 1 else Lane.NODE
    exchanges = dict.fromkeys([f"dispatch.{lane}", *([f"hot.{lane}"] if plan.hot else [])], 0.0)
    return CellTable(CellCosts.of(segments, exchanges))


def _attached(
    schedule: Schedule, table: CellTable, source: Source | None
) -> tuple[CellTable, dict[str, PlanOrder], Attachments]:
    """The table by the method of the plan, the orders of the plan by kind of cell, and the plan. Raises S404."""
    if len(table.blocks) not in (1, schedule.stages):
        message = f"`stages` has the blocks of {len(table.blocks)} stages, the schedule has {schedule.stages}"
        help = f"give {schedule.stages} texts, one per stage, or a single one for all"
        raise DiagnosticError([problem("S404", message, source, "stages", help=help)])
    return *_planned(schedule, table), plan_of(schedule)


def with_layout(table: CellTable, layout: Layout) -> CellTable:
    """With the blocks that a layout gives each stage. A multi-token prediction is a MoE block if there are any.

    Embedding and head have no node of their own; their times belong to the first and the last segment.
    """
    predicted = "moe" if layout.total(PartKind.MOE) else "dense"
    names = {kind: kind.value for kind in DECODER} | {PartKind.MTP: predicted}
    return table.with_blocks([[names[part.kind] for part in parts if part.kind in names] for parts in layout.stages])


def with_recomputation(costs: Costs, schedule: Schedule) -> Costs:
    """Costs that know cells with the R of each stage: as much of its F as the nodes that it does are of the forward.

    schedule: with the blocks of its layout in ``costs``, `with_layout`, and its plan.
    """
    assert costs.cell is not None
    table, _ = _planned(schedule, costs.cell)
    shares = shares_of_forward(table.shapes(schedule.stages), plan_of(schedule), table.costs)
    return replace(costs, R=tuple((costs.resolved(schedule.stages).F * shares).tolist()))


def _planned(schedule: Schedule, table: CellTable) -> tuple[CellTable, dict[str, PlanOrder]]:
    """The method that the plan chooses, and its orders by hand by kind of cell."""
    if not schedule.plan:
        return table, {}
    plan = plan_of(schedule)
    choice = chosen_method(plan)
    method = choice.method if choice else plan.method
    orders = {cell.kind: PlanOrder(cell.compute, cell.communication) for cell in plan.cells}
    return table if method == Method.AUTO else replace(table, method=str(method)), orders
