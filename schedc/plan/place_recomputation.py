"""`recompute ... in bubbles`: an R before the backwards for which their rank stands idle, placed by the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.timeline import Timeline, simulate
from schedc.cost.costs import Costs
from schedc.ir.arrays import Int64
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule

MOST_ROUNDS = 16
"""Times that the timeline is looked at: what is placed moves what comes after it, and so the bubbles."""

_ROUNDING = 1e-9
"""Relative to the makespan: a shorter wait is none."""


def recompute_in_backwards(costs: Costs, stages: Sequence[bool]) -> Costs:
    """The costs where backwards of ``stages`` that have no R do inside of themselves what one would do."""
    again = costs.resolved(len(stages)).R * np.asarray(stages, bool)
    return replace(costs, recompute_in_backward=tuple(again.tolist()))


def place_recomputations(known: Dependencies, costs: Costs, stages: Sequence[bool]) -> Dependencies:
    """The schedule with an R directly before each cell whose backward is of one of ``stages`` and waits for a gradient.

    costs: of the stages, `recompute_in_backwards`. A round takes the waits of one timeline; another follows while there
    are new ones. No R can make the step longer: what a backward would do inside of itself after its gradient has come
    begins before.
    """
    timeline = simulate(known.schedule, costs, known)
    for _ in range(MOST_ROUNDS):
        waiting = _waiting(timeline, np.asarray(stages, bool))
        if not waiting.size:
            break
        more = Dependencies.of(_with_recomputation(known, waiting))
        after = simulate(more.schedule, costs, more)
        if after.makespan > timeline.makespan * (1 + _ROUNDING):
            break
        known, timeline = more, after
    return known


def _waiting(timeline: Timeline, stages: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Int64:
    """The cells whose rank stands idle before them, with a backward of these stages that has no R."""
    known = timeline.dependencies
    schedule, last = known.schedule, np.maximum(known.first, known.second)
    free = np.where(known.previous >= 0, timeline.end[known.previous], 0.0)
    idle = timeline.start - free > _ROUNDING * timeline.makespan
    wanted = BACKWARD[schedule.kind[last]] & stages[schedule.stage[last]] & ~recomputed_ops(schedule)[last]
    return np.flatnonzero(idle & wanted)


def _with_recomputation(known: Dependencies, cells: Int64) -> Schedule:
    """The schedule with an R before each of these cells, of the microbatch of its backward."""
    schedule = known.schedule
    before, of = known.first[cells], np.maximum(known.first, known.second)[cells]
    columns: dict[str, Any] = {
        name: np.insert(column := getattr(schedule, name), before, column[of])
        for name in ("stage", "microbatch", "phase", "span")
    }
    return replace(
        schedule,
        rank_start=schedule.rank_start + np.searchsorted(before, schedule.rank_start),
        kind=np.insert(schedule.kind, before, np.int8(OpKind.R)),
        pair=np.insert(schedule.pair, before, np.int32(-1)),
        **columns,
    )
