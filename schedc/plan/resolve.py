"""Resolves a plan for one schedule at one size: choices, recomputation per stage, and findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.plan import Plan
from schedc.ir.schedule import Schedule
from schedc.plan.counts.layers import counted_activations
from schedc.plan.directives import DIRECTIVES
from schedc.plan.directives.base import Directives
from schedc.plan.layout.parts import DECODER, Layout, PartKind


def resolve(directives: Directives, schedule: Schedule, layout: Layout) -> Plan:
    """What a checked plan attaches to a schedule with this layout.

    Raises `DiagnosticError` (S145 to S149, S323) at the place in the plan.
    """
    findings = list(_unknown_memory(directives, layout))
    if not findings:
        rows = DIRECTIVES.values()
        findings = [found for row in rows for found in row.check_schedule(directives, schedule, layout)]
    if findings:
        raise DiagnosticError(findings)
    values: dict[str, Any] = {}
    for directive in reversed(DIRECTIVES.values()):  # levels of stages are refused before orders of cells
        values |= directive.resolve(directives, schedule)
    return replace(directives.plan, **values)


def _unknown_memory(directives: Directives, layout: Layout) -> Iterator[Diagnostic]:
    """S146: the memory is in bytes, and the layout has a kind of layer whose activations are not known."""
    memory = directives.tree.memory
    if memory is None or not memory.unit:
        return
    written = {entry.name for entry in directives.entries("activations")}
    known = written | counted_activations(directives.plan).keys()
    missing = [kind for kind in (*DECODER, PartKind.MTP) if layout.total(kind) and str(kind) not in known]
    if missing:
        message = f"the memory is in bytes, and what a {missing[0]} layer holds is not known"
        help = f"write `activations {missing[0]} 400 MB`"
        more = "; of MoE layers it follows from `experts ... width F hidden H` and `tokens`"
        more += "; dense ones follow from `block hidden H inner F`"
        yield directives.fault(memory.span, "S146", message, help + more)
