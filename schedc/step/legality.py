"""Whether a schedule can run at all: the invariants of its ops, then whether ranks wait for each other for ever."""

from __future__ import annotations

from schedc.diagnostics import Diagnostic
from schedc.ir.schedule import Schedule
from schedc.ir.verify import verify
from schedc.step.deadlock import deadlock_diagnostics
from schedc.step.dependencies import Dependencies


def check_schedule(schedule: Schedule) -> list[Diagnostic]:
    """Everything that keeps a schedule from running; empty if it is legal.

    Deadlock (S301) is looked for only where the ops are complete and in order: else the trail would lead through
    missing ops.
    """
    return check_dependencies(schedule)[1]


def check_dependencies(schedule: Schedule) -> tuple[Dependencies | None, list[Diagnostic]]:
    """The findings of `check_schedule`, and the dependencies of a schedule that it got to ask for a deadlock."""
    if found := verify(schedule):
        return None, found
    known = Dependencies.of(schedule)
    return known, deadlock_diagnostics(known)
