"""When copies of experts travel in a step of a plan, for drawings and exports."""

from __future__ import annotations

from schedc.plan.passes import Step, lower
from schedc.step.cells.copies_in_step import copies_in_step
from schedc.step.copy_runs import CopyRuns


def travelling_copies(step: Step) -> CopyRuns | None:
    """The exchanges of copies, with the timeline from inside cells.

    None for a plan without copies, beside works, and where no exchange of copies takes time.
    """
    if step.placed is not None or not step.schedule.plan.copies_experts:
        return None
    inside = lower(step, "inside").inside
    return None if inside is None else copies_in_step(inside)
