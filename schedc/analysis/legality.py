"""Whether a schedule can run at all: the invariants of its ops, then whether ranks wait for each other for ever."""

from __future__ import annotations

from schedc.analysis.deadlock import deadlock_diagnostics
from schedc.analysis.dependencies import Dependencies
from schedc.diagnostics import Diagnostic
from schedc.ir.schedule import Schedule
from schedc.ir.verify import verify


def check_schedule(schedule: Schedule) -> list[Diagnostic]:
    """Everything that keeps a schedule from running; empty if it is legal.

    Deadlock (S301) is looked for only where the ops are complete and in order: before that its trail would
    lead through ops that do not exist.
    """
    return verify(schedule) or deadlock_diagnostics(Dependencies.of(schedule))
