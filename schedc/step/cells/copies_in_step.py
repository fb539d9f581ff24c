"""Reads off the walk of a step when copies of experts travel on one rank of the expert group."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedc.cell.program import graph_of
from schedc.step.cells.cell_pricing import CellPricing
from schedc.step.cells.group_pricing import RankRows, WalkedGroup, walk_group
from schedc.step.copy_runs import CopyColumns, CopyRuns
from schedc.step.timeline import Timeline


def copies_in_step(inside: CellPricing) -> CopyRuns | None:
    """The exchanges of copies in the step of `CellPricing.late_wait`; None where none takes time."""
    group, programs = inside.ranks or RankRows(np.ones((1, 1, 1)), ()), [of.program_on_ranks for of in inside.kinds]
    walked = walk_group(
        inside.dependencies, programs, inside.kind, inside.costs, group, inside.p2p, False, inside.timed
    )
    timeline, rank = inside.late_wait, 0 if inside.group is None else inside.group.rank
    return CopyRuns.of(_travelled(walked, rank, timeline), timeline)


def _travelled(walked: WalkedGroup, rank: int, timeline: Timeline) -> Iterator[CopyColumns]:
    dependencies = timeline.dependencies
    schedule = dependencies.schedule
    second = np.where(dependencies.second >= 0, dependencies.second, dependencies.first)
    for each, own in walked.cells():
        for task, *times in each.travelled(walked.values, walked.lowered.base[own]):
            copy = each.copies[task]
            ops = graph_of(each.tasks.tasks.kind, copy.half, dependencies.first, second)[own]
            microbatch = np.full(own.size, -1) if copy.for_step else schedule.microbatch[ops].astype(np.int64)
            columns = schedule.stage[ops].astype(np.int64), microbatch, own, *(time[:, rank] for time in times)
            yield CopyColumns(copy.layer, each.lanes[task], copy.gradients, *columns)
