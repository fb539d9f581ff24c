"""The time of an expert's way to another rank, over that of a rank's experts in a step."""

from __future__ import annotations

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc_runtime.moe.hot_choice import times_by_role


def move_time(expert_bytes: int, row_bytes: int, rows: float, ranks: int, costs: CellCosts | None) -> float:
    """The price of a move: 1 is the time of the mean rows of a rank in the experts of one layer and step.

    expert_bytes: all that moves with an expert. row_bytes: of a row of activations. rows: mean of a rank, layer and
    step. costs: times of a microbatch's segments and exchanges. Without them bytes are compared: a row travels four
    times in a step, and its way is as long as its work.
    """
    as_rows, times = expert_bytes / row_bytes, {} if costs is None else times_by_role(costs)
    work, dispatch = sum(times.get("experts", ())), times.get("dispatch", SegmentTimes(0.0)).forward
    if not work or not dispatch:
        return as_rows / max(1.0, 4 * rows)
    mean_way = dispatch * ranks / (ranks - 1)  # of a microbatch's mean rows, as if none of them stayed
    return as_rows / max(1.0, rows) * mean_way / work
