"""The order that simulating ranks gives, and the schedule with its ops in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedc.elaborate.clock import CellRows
from schedc.ir.arrays import Bools, Int64
from schedc.ir.schedule import Schedule


@dataclass(frozen=True, eq=False)
class SimulatedOrder:
    """The order that a simulation gives, and its times in the time unit of the costs.

    rows: [ran] rows of the schedule, rank by rank, in the order of their start. second: [ran] whether an op is the
    second one of a pair with the op before it.
    makespan: when the last op ends. span: longest time from a rank's first op to the end of its last.
    complete: whether all ops ran; otherwise the ranks deadlock.
    """

    rows: Int64
    second: Bools
    makespan: float
    span: float
    complete: bool

    @classmethod
    def of_cells(
        cls, cells: Sequence[Sequence[CellRows]], makespan: float, span: float, complete: bool
    ) -> SimulatedOrder:
        """cells: [ranks] ops and pairs of each rank in the order of their start."""
        in_order = [cell for rank in cells for cell in rank]
        rows = np.array([row for cell in in_order for row in cell], np.int64)
        second = np.array([place > 0 for cell in in_order for place in range(len(cell))], bool)
        return cls(rows, second, makespan, span, complete)


def in_run_order(schedule: Schedule, ran: SimulatedOrder) -> Schedule:
    """The schedule with its ops in the order in which they ran."""
    first = np.append(ran.second[1:], False)
    pair = np.where(first | ran.second, np.cumsum(first) - 1, -1).astype(np.int32)
    columns = {name: getattr(schedule, name)[ran.rows] for name in ("kind", "stage", "microbatch", "phase", "span")}
    return replace(schedule, pair=pair, **columns)
