"""Gives a step its order: made elsewhere, frozen in a file, or elaborated from a schedule's text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from schedc.diagnostics import DiagnosticError
from schedc.elaborate.frozen import thaw
from schedc.elaborate.schedule import elaborate
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_dependencies
from schedc.step.op_times import Pricer
from schedc.syntax.input import AppliedPlan, Input, Order
from schedc.syntax.tree import ScheduleTree


def order(tree: Input, sizes: Mapping[str, int], costs: Costs) -> Dependencies:
    """The dependencies of a legal order. A policy of a plan's schedule follows costs of ops here, not those of stages.

    Raises `DiagnosticError` where the order is incomplete, illegal or deadlocks.
    """
    if isinstance(tree, Order):
        return Dependencies.of(tree.at(sizes))  # judged when it was read
    if isinstance(tree, AppliedPlan):
        return order_of(tree.schedule, sizes, costs if costs.parts is None else replace(costs, parts=None))
    return order_of(tree, sizes, costs, order_pricer(costs, tree.slices or 1))


def order_of(tree: ScheduleTree, sizes: Mapping[str, int], costs: Costs, pricer: Pricer | None = None) -> Dependencies:
    """The dependencies of a schedule, as the check for deadlocks computed them. pricer: judges a policy's order."""
    if (frozen := thaw(tree, sizes)) is not None:
        return Dependencies.of(frozen)
    dependencies, findings = check_dependencies(elaborate(tree, sizes, costs, pricer))
    if dependencies is None or findings:
        raise DiagnosticError(findings)
    return dependencies


def order_pricer(costs: Costs, slices: int = 1) -> Pricer | None:
    """What orders a policy by more than the costs of ops: the table of cells of ``costs``; None without a table.

    slices: number of slices of a microbatch.
    """
    if costs.cell is None:
        return None
    from schedc.plan.attached import CellPricer

    return CellPricer(costs, slices=slices)
