"""Searches cells of the frontier: orders at less memory than P microbatches, with their floors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.frontier.library import library_at, same_placement
from schedc.frontier.points import FrontierPoint, chunk_costs, point_of
from schedc.search.solver import Effort
from schedc.search.tune import tune
from schedc.step.costs.costs import Costs

SHARES = (0.5, 0.625, 0.75, 0.875)
"""Memory of the searched cells, over P microbatches."""

PER_RANK = (4, 2)
"""Stages per rank of the searched cells, which are those of `zb_wave`."""


class SearchedCell(NamedTuple):
    """A cell that was searched. memory: the cap, in microbatches. point: None if no order within the cap was found.

    bound: bubble that no order in the cell undercuts, in the unit of the costs. proven: whether the order has it.
    kept: path of the order among those kept with the library; empty for one that was found now.
    """

    per_rank: int
    memory: float
    point: FrontierPoint | None
    bound: float
    proven: bool
    kept: str = ""


def searched_cells(ranks: int, microbatches: int, costs: Costs, seconds: float) -> Iterator[SearchedCell]:
    """The best order of each cell that is found in its part of the seconds."""
    waves = {each.per_rank: each for each in library_at(ranks, microbatches) if each.name == "zb_wave"}
    cells = [(v, cap) for v in PER_RANK if v in waves for cap in (share * ranks for share in SHARES)]
    for v, cap in cells:
        seed, own = waves[v], chunk_costs(costs, v)
        room = float(np.floor(cap * v + 1e-9))
        effort, known = Effort(seconds / len(cells), workers=2), same_placement(seed.schedule.placement, microbatches)
        try:
            tuned = tune(seed.schedule, own, caps=np.full(ranks, room), effort=effort, known=known)
        except DiagnosticError:
            yield SearchedCell(v, cap, None, 0.0, False)
            continue
        point = point_of(seed._replace(schedule=tuned.best.schedule), own)
        command = point.command.replace("schedc check", "schedc tune") + f" --memory {room / v:g}"
        work = float(tuned.best.timeline.busy.max())
        yield SearchedCell(v, cap, point._replace(command=command), (tuned.bound - work) / v, tuned.proven)
