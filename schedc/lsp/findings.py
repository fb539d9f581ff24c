"""Everything that is wrong with the text of a file, as `schedc check` at the default sizes would find it."""

from __future__ import annotations

from schedc.analysis.claims import check_claims
from schedc.check import check
from schedc.compiler import legal_schedule
from schedc.cost.costs import Costs
from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.source import Source
from schedc.syntax.parser import parse
from schedc.syntax.tree import ScheduleTree


def findings(source: Source) -> list[Diagnostic]:
    """The diagnostics of all schedules of a text. One without default sizes is checked as far as that goes."""
    try:
        return [finding for tree in parse(source).schedules for finding in _of_schedule(tree)]
    except DiagnosticError as error:
        return list(error.diagnostics)


def _of_schedule(tree: ScheduleTree) -> list[Diagnostic]:
    if found := check(tree):
        return found
    if any(parameter.default is None for parameter in tree.parameters):
        return []
    try:
        results = check_claims(tree.claims, legal_schedule(tree, {}), Costs())
    except DiagnosticError as error:
        return list(error.diagnostics)
    return [result.diagnostic for result in results if result.diagnostic is not None]
