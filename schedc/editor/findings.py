"""Everything that is wrong with the text of a file, as `schedc check` at the default sizes would find it."""

from __future__ import annotations

from schedc.check.names import check
from schedc.claims.check import check_claims
from schedc.compiler import legal_schedule
from schedc.cost.costs import Costs
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate.fastest import has_policy
from schedc.load.library import applied
from schedc.plan.check_lines import check_plan_lines
from schedc.source import Source
from schedc.syntax.parser import parse
from schedc.syntax.plan import PlanTree
from schedc.syntax.tree import FileTree, ScheduleTree


def findings(source: Source) -> list[Diagnostic]:
    """The diagnostics of all schedules of a text. One without default sizes is checked as far as that goes."""
    try:
        file = parse(source)
    except DiagnosticError as error:
        return list(error.diagnostics)
    found = [finding for tree in file.schedules for finding in _of_schedule(tree)]
    return found or [finding for plan in file.plans for finding in _of_plan(plan, file)]


def _of_plan(tree: PlanTree, file: FileTree) -> list[Diagnostic]:
    """What is wrong with a plan whose file holds nothing but right schedules, where it stands in this text."""
    try:
        plan = applied(tree, file)
        if found := check_plan_lines(tree):
            return found
        if all(parameter.default is not None for parameter in plan.parameters):
            legal_schedule(plan, {})
    except DiagnosticError as error:
        return [found for found in error.diagnostics if found.source == tree.source]
    return []


def _of_schedule(tree: ScheduleTree) -> list[Diagnostic]:
    if found := check(tree):
        return found
    if any(parameter.default is None for parameter in tree.parameters):
        return []
    try:
        results = check_claims(tree.claims, legal_schedule(tree, {}), Costs(), follows_costs=has_policy(tree))
    except DiagnosticError as error:
        return list(error.diagnostics)
    return [result.diagnostic for result in results if result.diagnostic is not None]
