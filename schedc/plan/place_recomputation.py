"""Places the Rs of `recompute ... in bubbles`: an R before each backward with idle time in front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from schedc.ir.arrays import Bools, Int64
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import Timeline, simulate

MOST_ROUNDS = 16
"""The most simulations: an R moves everything after it, and so the bubbles."""

_ROUNDING = 1e-9
"""Idle times below this share of the makespan are rounding."""


def recompute_in_backwards(costs: Costs, stages: Sequence[bool]) -> Costs:
    """The costs in which backwards without an R take its time too, in the stages where ``stages`` [stages] is true."""
    known = costs.resolved(len(stages))
    time = np.where(np.asarray(stages, bool), known.R, known.recompute_in_backward)
    return replace(costs, recompute_in_backward=tuple(time.tolist()))


def place_recomputations(dependencies: Dependencies, costs: Costs, stages: Sequence[bool]) -> Dependencies:
    """The schedule with an R directly before each cell whose backward waits for its gradient while its rank idles.

    dependencies: those of a legal schedule. costs: those of the stages, by `recompute_in_backwards`. stages: [stages]
    whether the backwards of a stage may get an R. A round serves the waits of one timeline, and rounds follow while new
    waits appear. An R cannot make the step longer: the recomputation starts earlier than inside the backward.
    """
    timeline = simulate(dependencies.schedule, costs, dependencies)
    for _ in range(MOST_ROUNDS):
        waiting = _waiting(timeline, np.asarray(stages, bool))
        if not waiting.size:
            break
        more = Dependencies.of(_with_recomputation(dependencies, waiting))
        after = simulate(more.schedule, costs, more)
        if after.makespan > timeline.makespan * (1 + _ROUNDING):
            break
        dependencies, timeline = more, after
    return dependencies


def with_every_recomputation(dependencies: Dependencies, stages: Bools) -> Dependencies:
    """The schedule with an R directly before every cell with a backward of these stages; stages: [stages]."""
    schedule, last = dependencies.schedule, np.maximum(dependencies.first, dependencies.second)
    wanted = BACKWARD[schedule.kind[last]] & stages[schedule.stage[last]] & ~recomputed_ops(schedule)[last]
    return Dependencies.of(_with_recomputation(dependencies, np.flatnonzero(wanted)))


def _waiting(timeline: Timeline, stages: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Int64:
    """Indices of cells with idle time in front, and with a backward of one of these stages that has no R."""
    cells = timeline.dependencies
    schedule, last = cells.schedule, np.maximum(cells.first, cells.second)
    free = np.where(cells.previous >= 0, timeline.end[cells.previous], 0.0)
    idle = timeline.start - free > _ROUNDING * timeline.makespan
    wanted = BACKWARD[schedule.kind[last]] & stages[schedule.stage[last]] & ~recomputed_ops(schedule)[last]
    return np.flatnonzero(idle & wanted)


def _with_recomputation(dependencies: Dependencies, cells: Int64) -> Schedule:
    """The schedule with an R of the backward's microbatch before each of these cells."""
    schedule = dependencies.schedule
    before = dependencies.first[cells]
    backward = np.maximum(dependencies.first, dependencies.second)[cells]
    columns: dict[str, Any] = {
        name: np.insert(column := getattr(schedule, name), before, column[backward])
        for name in ("stage", "microbatch", "phase", "span")
    }
    return replace(
        schedule,
        rank_start=schedule.rank_start + np.searchsorted(before, schedule.rank_start),
        kind=np.insert(schedule.kind, before, np.int8(OpKind.R)),
        pair=np.insert(schedule.pair, before, np.int32(-1)),
        **columns,
    )
