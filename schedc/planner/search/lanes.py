"""Seconds of parts by the lanes that they keep busy: all in one after the other, or exchanges beside compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.planner.price.part_table import HAS_EXPERTS, OP, PartTable
from schedc.planner.price.recomputed import EXCHANGES, LEVELS, compute_of_cells


@dataclass(frozen=True, eq=False)
class LaneSeconds:
    """Busy time of a lane for one microbatch.

    forward, input, weight: [rows, kinds] seconds of parts. recomputed: [rows, levels, kinds] seconds that a backward
    recomputes for, by `LEVELS`. op: [rows, 3] seconds that each op takes on top: F, I and W.
    """

    forward: Floats
    input: Floats
    weight: Floats
    recomputed: Floats
    op: Floats


def serial_lane(table: PartTable, rows: Int64, splits: bool) -> LaneSeconds:
    """The one lane of ops whose exchanges nothing hides. rows: [rows] of the table."""
    factor = table.split_factor(splits)
    ops = np.stack([time[rows, OP] for time in (table.forward, table.input, table.weight)], axis=1)
    return LaneSeconds(
        table.forward[rows, :OP],
        table.input[rows, :OP] * factor,
        table.weight[rows, :OP] * factor,
        table.recompute_seconds[rows],
        ops,
    )


def overlapped_lanes(table: PartTable, rows: Int64, splits: bool) -> list[LaneSeconds]:
    """The lanes of compute and of both kinds of links. rows: [rows] of the table.

    A recomputation counts only for the segments that a level repeats as steps of their own: the least of it.
    """
    factor = table.split_factor(splits)
    whole = serial_lane(table, rows, splits)
    rail, node = table.rail[rows], table.node[rows]
    exchanges = 2.0 * (rail + node)[:, None] * HAS_EXPERTS
    recomputed = _recomputed_compute(table, rows)[:, :, None] * HAS_EXPERTS
    compute = LaneSeconds(
        whole.forward - exchanges,
        whole.input - exchanges * factor,
        whole.weight,
        recomputed,
        whole.op,
    )
    flat = np.array([table.splits[row].alltoall == "flat" for row in rows.tolist()])
    on_rail = np.where(flat, rail + node, rail)
    return [compute, *(_links(lane, factor) for lane in (on_rail, np.where(flat, 0.0, node)))]


def chain_seconds(table: PartTable, rows: Int64, splits: bool) -> tuple[Floats, Floats]:
    """[rows, kinds + 1] seconds of a chain through a part, forward and of input gradients; of an op in the last column.

    A shared expert may run beside the exchanges of its layer, and is left out. rows: [rows] of the table.
    """
    factor, whole = table.split_factor(splits), serial_lane(table, rows, splits)
    forward, input, _ = _shared(table, rows)
    return (
        np.concatenate([whole.forward - forward, whole.op[:, :1]], axis=1),
        np.concatenate([whole.input - input * factor, whole.op[:, 1:2]], axis=1),
    )


def _shared(table: PartTable, rows: Int64) -> tuple[Floats, Floats, Floats]:
    """[rows, kinds] seconds of F, I and W of the shared experts of parts."""
    none = np.zeros((rows.size, OP))
    if "shared" not in table.segments:
        return none, none, none
    forward, input, weight = (time[rows][:, None] * HAS_EXPERTS for time in table.segments["shared"])
    return forward, input, weight


def _links(seconds: Floats, factor: float) -> LaneSeconds:
    """A lane of links that one dispatch, or one combine, takes for ``seconds`` [rows]."""
    layer = 2.0 * seconds[:, None] * HAS_EXPERTS
    recomputed = seconds[:, None, None] * EXCHANGES[None, :, None] * HAS_EXPERTS
    return LaneSeconds(layer, layer * factor, np.zeros_like(layer), recomputed, np.zeros((seconds.size, 3)))


def _recomputed_compute(table: PartTable, rows: Int64) -> Floats:
    """[rows, levels] seconds of compute that the backward of a layer with experts repeats at least, by `LEVELS`."""
    if not table.problem.model.moe:
        return np.zeros((rows.size, len(LEVELS)))
    segments = {role: times[:, rows] for role, times in table.segments.items()}
    return compute_of_cells(segments, {role: seconds[rows] for role, seconds in table.again.items()})
