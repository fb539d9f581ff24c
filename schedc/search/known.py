"""Reads orders of other schedules as priorities of a problem's cells, where both have the same stages on ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from schedc.ir.arrays import Int64
from schedc.ir.op_tables import TURN
from schedc.ir.schedule import Schedule
from schedc.search.problem import SearchProblem
from schedc.step.timeline import simulate


def known_starts(problem: SearchProblem, known: Iterable[tuple[str, Schedule]]) -> Iterator[tuple[str, Int64]]:
    """The names of orders with the problem's placement, and [cells] when the cells start in them, in half slots.

    A W that the order does not split off follows its B. Ops with recomputations count as none.
    """
    own = problem.schedule
    first = problem.dependencies.first
    for name, schedule in known:
        if schedule.placement != own.placement:
            continue
        timeline = simulate(schedule)
        start = np.full((4, schedule.stages, schedule.microbatches), np.nan)
        start[TURN[schedule.kind], schedule.stage, schedule.microbatch] = timeline.start[timeline.dependencies.cell_of]
        start[2] = np.where(np.isnan(start[2]), start[1] + 0.5, start[2])
        cells = start[TURN[own.kind[first]], own.stage[first], own.microbatch[first]]
        if not np.isnan(cells).any():
            yield name, np.rint(2 * cells).astype(np.int64)
