"""Checks that a cost file gives the times of all ops of a schedule: beside given times a default of 1 means nothing."""

from __future__ import annotations

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.step.costs.checks import problem
from schedc.step.costs.costs import ANCHORS, Costs
from schedc.step.costs.keys import BY_NAME

SOURCES: dict[OpKind, tuple[tuple[str, ...], ...]] = {
    kind: tuple(filter(None, [(kind.name,), BY_NAME[kind.name].sums])) for kind in OpKind
}
"""The keys that say how long an op of a kind takes: any of these tuples does."""


def given_costs(costs: Costs, schedule: Schedule, planned: object) -> Costs:
    """The costs, which say how long each op takes. Raises as `check_given`.

    planned: the plan of the order, whose stages may take times of parts; None without a plan.
    """
    if planned is None or costs.parts is None:
        check_given(costs, schedule)
    return costs


def check_given(costs: Costs, schedule: Schedule) -> None:
    """Raise `DiagnosticError` if costs leave out times of ops of a schedule.

    S410: they come from a file or a measurement that gives F or B. S411: they give times of parts.
    """
    costs.check_of_stages()
    if not ANCHORS & costs.given:
        return
    alone = ~_overlapped(costs, schedule)
    findings = [
        _finding(costs, schedule, kind, int(rows[0]))
        for kind, sources in SOURCES.items()
        if not any(costs.given.issuperset(keys) for keys in sources)
        and (rows := np.flatnonzero(alone & (schedule.kind == kind))).size
    ]
    if findings:
        raise DiagnosticError(findings)


def _overlapped(costs: Costs, schedule: Schedule) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[ops] whether an op is half of a pair whose time is given as FB."""
    if "FB" not in costs.given:
        return np.zeros(len(schedule), np.bool_)
    full = schedule.pair[schedule.kind == OpKind.B]
    return np.isin(schedule.pair, full[full >= 0])


def _finding(costs: Costs, schedule: Schedule, kind: OpKind, row: int) -> Diagnostic:
    op, name = schedule.op(row), kind.name
    first = f"{op.stage}{name}{op.microbatch}"
    message = f"the costs give no {name}, and `{schedule.name}` has ops of that kind, first {first}"
    both = "B, or I and W" if kind is OpKind.B else name
    help = f"write {both}, measure with `schedc calibrate`, or say it here: `--cost {name}=NUMBER`"
    return problem("S410", message, costs.source, "ops", help=help)
