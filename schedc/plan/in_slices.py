"""Slices that are asked for beside a schedule or a plan: by an option of a command, in place of a plan's lines."""

from __future__ import annotations

from dataclasses import replace

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.contradictions import contradictions
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.plan.directives.base import Directives, StageLine
from schedc.source import NOWHERE, Span
from schedc.step.dependencies import Dependencies


def with_slices(schedule: Schedule, slices: int) -> Schedule:
    """The schedule whose stages all run a microbatch in so many slices. Raises S153 where the plan excludes slices."""
    plan = schedule.plan
    if findings := _findings(replace(plan, slices=(slices,), slices_of_tokens=False), NOWHERE):
        raise DiagnosticError(findings)
    counts = (slices,) * schedule.stages if slices > 1 else ()
    return replace(schedule, plan=replace(plan, slices=counts, slices_of_tokens=False))


def in_slices(dependencies: Dependencies, slices: int) -> Dependencies:
    """The order `with_slices`."""
    return replace(dependencies, schedule=with_slices(dependencies.schedule, slices))


def plan_in_slices(directives: Directives, slices: int) -> Directives:
    """A plan with so many slices in place of its own. Raises S153 at its name where another line excludes them."""
    tree = directives.tree
    plan = replace(directives.plan, slices_of_tokens=False)
    if findings := _findings(replace(plan, slices=(slices,)), tree.span):
        raise DiagnosticError([replace(finding, source=tree.source) for finding in findings])
    return replace(directives, plan=plan, slices=[StageLine("all", (), slices, tree.span)])


def _findings(plan: Plan, span: Span) -> list[Diagnostic]:
    return [
        Diagnostic(wrong.code, wrong.message, Label(span), notes=wrong.notes, help=wrong.help)
        for wrong in contradictions(plan, None)
        if wrong.word == "slices"
    ]
