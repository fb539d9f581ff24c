"""Finds all faults in the text of a file, as `schedc check` does at the default sizes."""

from __future__ import annotations

from collections.abc import Callable

from schedc.claims.check import check_claims
from schedc.compiler import legal_schedule
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.elaborate.names import check
from schedc.load.library import applied
from schedc.plan.read import checked_lines
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.syntax.parser import parse
from schedc.syntax.plan import PlanTree
from schedc.syntax.tree import FileTree, ScheduleTree


def findings(source: Source, sizes_of: Callable[[ScheduleTree], dict[str, int]] = lambda _: {}) -> list[Diagnostic]:
    """The diagnostics of all schedules and plans of a text. What has no default sizes is checked only without sizes.

    sizes_of: sizes at which a schedule is checked, in place of its defaults.
    """
    try:
        file = parse(source)
    except DiagnosticError as error:
        return list(error.diagnostics)
    of_schedules = [finding for tree in file.schedules for finding in _of_schedule(tree, sizes_of)]
    return of_schedules or [finding for plan in file.plans for finding in _of_plan(plan, file)]


def _of_plan(tree: PlanTree, file: FileTree) -> list[Diagnostic]:
    """Findings in this text about a plan. The schedules of the file must be free of faults."""
    try:
        plan = applied(tree, file)
        if all(parameter.default is not None for parameter in plan.parameters):
            legal_schedule(plan, {})
        else:
            checked_lines(plan)
    except DiagnosticError as error:
        return [finding for finding in error.diagnostics if finding.source == tree.source]
    return []


def _of_schedule(tree: ScheduleTree, sizes_of: Callable[[ScheduleTree], dict[str, int]]) -> list[Diagnostic]:
    """Findings about the names of a schedule, and at its sizes about its order and its claims."""
    if findings := check(tree):
        return findings
    sizes = sizes_of(tree)
    if any(parameter.default is None and parameter.name not in sizes for parameter in tree.parameters):
        return []
    try:
        schedule = legal_schedule(tree, sizes)
        results = check_claims(tree.claims, schedule, Costs(), follows_costs=tree.has_policy)
    except DiagnosticError as error:
        return list(error.diagnostics)
    return [result.diagnostic for result in results if result.diagnostic is not None]
