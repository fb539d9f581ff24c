"""Treats segments of a sequence as microbatches of their own, and checks that each runs behind all needed segments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.placement import Placement
from schedc.ir.schedule import Schedule


def in_segments(placement: Placement, parts: int) -> Placement:
    """The placement in which segments are microbatches.

    With k = ``parts`` segments, segment j of microbatch m is microbatch m k + j.
    """
    if parts == 1:
        return placement
    return replace(placement, first_microbatch=tuple(parts * first for first in placement.first_microbatch))


def out_of_order(schedule: Schedule, parts: int) -> list[Diagnostic]:
    """A finding (S125) for every op of the text that runs before another segment of its microbatch that it needs.

    On each stage, the forward of a segment reads the keys and values of the segments before it. Its backward needs
    the gradients that the later segments add to them (Seq1F1B, arXiv 2406.03488). All these ops share a rank.
    """
    if parts == 1:
        return []
    backward = BACKWARD[schedule.kind]
    unit = np.arange(schedule.microbatches)
    findings: list[Diagnostic] = []
    for chosen, step, name in ((schedule.kind == OpKind.F, +1, "forward"), (backward, -1, "backward")):
        rows = np.flatnonzero(chosen)
        row_of = np.full((schedule.stages, schedule.microbatches), -1)
        row_of[schedule.stage[rows], schedule.microbatch[rows]] = rows
        first = unit[(unit % parts + step >= 0) & (unit % parts + step < parts)]
        early = row_of[:, first + step][row_of[:, first] > row_of[:, first + step]]
        early = early[early >= 0]
        for row in early[np.unique(schedule.span[early], return_index=True)[1]].tolist():
            microbatch, segment = divmod(int(schedule.microbatch[row]), parts)
            message = f"the {name} of segment {segment} of microbatch {microbatch} on stage {schedule.stage[row]} runs "
            label = Label(schedule.spans[schedule.span[row]])
            help = "forwards take the segments of a microbatch from first to last, backwards from last to first"
            message += f"before the needed {name} of segment {segment - step}"
            findings.append(Diagnostic("S125", message, label, help=help, source=schedule.source))
    return findings
