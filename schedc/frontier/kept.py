"""Opens orders that are kept with the library: those that searches found below P microbatches of memory.

Each is a file such as `schedules/kept/p8_m32_v4_c28.order`, named by ranks, microbatches, stages per rank, and the
chunks that a rank may hold. The documentation of an order is the command of its search. Whenever an order is shown, it
is checked and priced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from schedc.compiler import legal_schedule
from schedc.diagnostics import CompilerBug
from schedc.frontier.found import SearchedCell
from schedc.frontier.library import SizedSchedule
from schedc.frontier.points import chunk_costs, least_bubbles, point_of
from schedc.inputs import open_order
from schedc.load.library import library_folder, path_from_here
from schedc.step.costs.costs import Costs

_NAME = re.compile(r"p(\d+)_m(\d+)_v(\d+)_c(\d+)\.order")
_SAME = 1e-9
"""Difference below which a bubble is its floor, in the unit of the costs."""


def kept_folder() -> Path:
    """The folder of the kept orders."""
    return library_folder() / "kept"


def kept_cells(ranks: int, microbatches: int, costs: Costs) -> Iterator[SearchedCell]:
    """The kept orders at these sizes, priced under costs of a microbatch on a rank, with their floors."""
    for path in sorted(kept_folder().glob(f"p{ranks}_m{microbatches}_*.order")):
        yield kept_cell(path, costs)


def kept_cell(path: Path, costs: Costs) -> SearchedCell:
    """A kept order as a cell.

    Raises `DiagnosticError` for an order that is not legal, and `CompilerBug` for one that is not as its name says.
    """
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise CompilerBug("frontier", f"{path.name} is no name of a kept order, such as p8_m32_v4_c28.order")
    per_rank, chunks = int(name[3]), int(name[4])
    schedule, own = legal_schedule(open_order(path), {}), chunk_costs(costs, per_rank)
    sized = SizedSchedule(schedule.name, dict(schedule.sizes), schedule)
    point, shown, cap = point_of(sized, own), path_from_here(path), chunks / per_rank
    command = point.command.split(" --cost", 1)
    point = point._replace(command=" --cost".join([f"schedc check {shown}", *command[1:]]))
    if point.memory > cap + _SAME:
        raise CompilerBug("frontier", f"{path.name} exceeds {chunks} chunks: it holds {point.memory * per_rank:g}")
    (bound,) = least_bubbles(sized, own, [cap])
    return SearchedCell(per_rank, cap, point, bound, point.bubble <= bound + _SAME, shown)


def best_cells(cells: Sequence[SearchedCell]) -> list[SearchedCell]:
    """One cell for each number of stages per rank and memory: the one with the least bubble, and the largest bound."""
    best: dict[tuple[int, float], SearchedCell] = {}
    for cell in cells:
        place = cell.per_rank, cell.memory
        other = best.get(place, cell)
        shorter = cell if _bubble(cell) < _bubble(other) - _SAME else other
        bound = max(cell.bound, other.bound)
        best[place] = shorter._replace(bound=bound, proven=_bubble(shorter) <= bound + _SAME)
    return list(best.values())


def _bubble(cell: SearchedCell) -> float:
    return float("inf") if cell.point is None else cell.point.bubble
