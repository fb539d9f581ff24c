"""Reads the directives of a plan: from its lines to values, with the findings of the lines at their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from schedc.diagnostics import DiagnosticError
from schedc.ir.contradictions import contradictions
from schedc.plan.check_lines import check_plan_lines
from schedc.plan.directives import DIRECTIVES
from schedc.plan.directives.base import Directives, Reading, RecomputeRequest, SlicesRequest
from schedc.plan.in_slices import plan_in_slices
from schedc.syntax.input import AppliedPlan
from schedc.syntax.plan import PlanTree


def checked_lines(plan: AppliedPlan) -> Directives:
    """The checked directives of a plan, with the slices that are asked for beside it.

    Raises `DiagnosticError` with the findings of its lines, and S153 for slices that they exclude.
    """
    segments = next((size.name for size in plan.schedule.parameters if size.role == "segments"), "")
    directives = replace(read_directives(plan.tree), segments=segments)
    if findings := check_plan_lines(directives):
        raise DiagnosticError(findings)
    return directives if plan.slices is None else plan_in_slices(directives, plan.slices)


def read_directives(tree: PlanTree) -> Directives:
    """The directives of a plan. A line with findings says nothing else."""
    reading = Reading(tree)
    for line in tree.lines:
        if (directive := DIRECTIVES.get(line.word)) is None:
            continue
        if line.word in reading.spans and not directive.several:
            reading.fault("S144", f"`{line.word}` is said twice", line.span, f"keep one `{line.word}` line")
            continue
        reading.spans.setdefault(line.word, line.span)
        directive.read(reading, line)
    _check(reading)
    findings = tuple(sorted(reading.findings, key=lambda finding: finding.primary.span))
    return Directives(
        tree, reading.plan, tuple(reading.requests), reading.spans, findings, slices=tuple(reading.slices)
    )


def _check(reading: Reading) -> None:
    """The findings of lines beside each other, before any size is known."""
    topology, requests = reading.plan.topology, reading.requests
    slices = tuple(request.count for request in reading.slices)
    plan = replace(reading.plan, recompute=tuple(request.recompute for request in requests), slices=slices)
    for wrong in contradictions(plan, topology.ranks if topology else None):
        lines: Sequence[RecomputeRequest | SlicesRequest] = reading.slices if wrong.word == "slices" else requests
        span = reading.span(wrong.word) if wrong.index is None else lines[wrong.index].span
        reading.fault(wrong.code, wrong.message, span, wrong.help, wrong.notes)
    for directive in DIRECTIVES.values():
        directive.check_lines(reading)
