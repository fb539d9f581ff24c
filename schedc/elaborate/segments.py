"""Segments of a sequence: each is a microbatch of its own in the order, and needs those before it on its stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.ops import BACKWARD, OpKind
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule


def in_segments(placement: Placement, parts: int) -> Placement:
    """The placement whose microbatch m k + j is segment j of microbatch m, k being the number of ``parts``."""
    return replace(placement, first_microbatch=tuple(parts * first for first in placement.first_microbatch))


def out_of_order(schedule: Schedule, parts: int) -> list[Diagnostic]:
    """S125 for every op of the text that runs before another segment of its microbatch that it needs.

    On each stage the forward of a segment reads what attention keeps of the segments before it, and its backward
    what the backwards of those behind it add to the gradient (Seq1F1B, arXiv 2406.03488). Both are on the same rank.
    """
    if parts == 1:
        return []
    backward = BACKWARD[schedule.kind]
    unit = np.arange(schedule.microbatches)
    found: list[Diagnostic] = []
    for chosen, step, name in ((schedule.kind == OpKind.F, +1, "forward"), (backward, -1, "backward")):
        rows = np.flatnonzero(chosen)
        at = np.full((schedule.stages, schedule.microbatches), -1)
        at[schedule.stage[rows], schedule.microbatch[rows]] = rows
        first = unit[(unit % parts + step >= 0) & (unit % parts + step < parts)]
        early = at[:, first + step][at[:, first] > at[:, first + step]]
        early = early[early >= 0]
        for row in early[np.unique(schedule.span[early], return_index=True)[1]].tolist():
            microbatch, segment = divmod(int(schedule.microbatch[row]), parts)
            message = f"the {name} of segment {segment} of microbatch {microbatch} on stage {schedule.stage[row]} runs "
            label = Label(schedule.spans[schedule.span[row]])
            help = "forwards take the segments of a microbatch from first to last, backwards from last to first"
            message += f"before that of segment {segment - step}, which it needs"
            found.append(Diagnostic("S125", message, label, help=help, source=schedule.source))
    return found
