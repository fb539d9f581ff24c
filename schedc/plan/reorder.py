"""Orders the schedule of a plan anew, where its policy follows the costs of the plan's stages."""

from __future__ import annotations

from collections.abc import Mapping

from schedc.ir.plan import Plan
from schedc.plan.apply import stage_costs
from schedc.plan.attached import AttachedPlan, CellPricer
from schedc.plan.directives.base import Directives
from schedc.plan.layout.parts import Layout
from schedc.plan.order import order_of
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.syntax.input import AppliedPlan


def reorder(
    tree: AppliedPlan, sizes: Mapping[str, int], costs: Costs, directives: Directives, layout: Layout, plan: Plan
) -> Dependencies:
    """The order of a policy under the costs of the stages, from inside cells where the costs have a table of cells.

    costs: those of a layer. Raises `DiagnosticError` as `schedc.plan.order.order`.
    """
    of_stages = stage_costs(directives, layout, costs, plan)
    attached = AttachedPlan(tree.name, tree.doc, plan, layout, of_stages)
    return order_of(tree.schedule, sizes, of_stages, None if costs.cell is None else CellPricer(costs, attached))
