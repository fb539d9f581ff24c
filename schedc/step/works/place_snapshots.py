"""Places snapshots: the state of every stage leaves for the host in pieces, beside the cells of a step.

    cells     |  F0  |  F1  |      | B0   |  B1  | loss
    offloads  [=0=]  [=1=]
    pieces         [a]    [===b===][==c==][==d==]

A piece starts in a gap, behind the offloads that start there, and is as long as its lane is free until the next gap. So
no offload waits for a piece. All JOINs stand at the end of the stream, in front of the update.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int64, bincount, repeat
from schedc.ir.works import WorkKind, WorkLane
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks
from schedc.step.timeline import CellTimes
from schedc.step.work_runs import StepWorks


class SnapshotPrice(NamedTuple):
    """What copying the state of all ranks beside a step costs. Times are in the unit of the cells.

    step: the step with its pieces. bytes: [P] that each rank copies. fits: [P] those whose copy ends before the step
    would end without it; exposed: [P] the others. longer: time that the whole step takes more.
    """

    step: StepWorks
    bytes: Floats
    fits: Floats
    exposed: Floats
    longer: float


def place_snapshots(cells: CellTimes, bytes: Floats) -> PlacedWorks:
    """The pieces of the state of every stage, where nobody knows how fast copies are: in proportion to the cells' time.

    bytes: [stages] of the state; a stage without any has no pieces.
    """
    dependencies = cells.dependencies
    until = np.diff(_reached(cells.end, dependencies), append=0.0)
    last = _last_gaps(dependencies)
    until[last] = 0.0
    held, rank = held_by_ranks(dependencies, bytes), repeat(np.arange(last.size), np.diff(last, prepend=-1))
    whole = bincount(rank, weights=until, minlength=last.size)
    share = np.divide(until, whole[rank], out=np.zeros(until.size), where=whole[rank] > 0)
    return _cut(dependencies, held, share * held.sum(1)[rank])


def snapshot_price(step: StepWorks, bytes: Floats, per_byte: float) -> SnapshotPrice:
    """The price of pieces beside the works of a step, whose lane copies a byte in ``per_byte``.

    bytes: [P, stages] of the state of each stage on each rank.
    """
    cells, dependencies = step.cells, step.cells.dependencies
    alone = step.lanes
    reached, last = _reached(alone.end, dependencies), _last_gaps(dependencies)
    free = np.diff(reached, append=0.0) - _busy(step, reached, dependencies)
    free[last] = np.inf
    pieces = _cut(dependencies, np.where(_holds(dependencies), bytes, 0.0), free.clip(0.0) / per_byte)
    placed = step.placed.beside(pieces)
    is_piece = placed.works.kind == WorkKind.SNAPSHOT
    time = placed.works.bytes * per_byte
    time[~is_piece] = step.time
    priced = replace(step, placed=placed, time=time)
    end = max(float(alone.closed.max(initial=0.0)), cells.makespan if not len(step.placed) else 0.0)
    closed = priced.lanes.closed
    rank = placed.rank_of(placed.start, dependencies)[is_piece]
    copied = np.asarray(bincount(rank, weights=placed.works.bytes[is_piece], minlength=closed.size), np.float64)
    exposed = np.minimum(copied, (closed - end).clip(0.0) / per_byte)
    return SnapshotPrice(priced, copied, copied - exposed, exposed, max(0.0, float(closed.max(initial=0.0)) - end))


def evenly_held(dependencies: Dependencies, bytes: float) -> Floats:
    """[P, stages] bytes of the state of each stage on each rank, where ranks have ``bytes`` each."""
    holds = _holds(dependencies)
    return np.asarray(holds * (bytes / holds.sum(1, keepdims=True)))


def _last_gaps(dependencies: Dependencies) -> Int64:
    """[P] the gap behind the last cell of each rank."""
    return np.asarray(dependencies.rank_start[1:] + np.arange(dependencies.rank_start.size - 1))


def _holds(dependencies: Dependencies) -> Bools:
    """[P, stages] whether a rank holds a stage."""
    of_stage = dependencies.schedule.placement.rank_of_stage
    holds = np.zeros((dependencies.rank_start.size - 1, of_stage.shape[1]), bool)
    for row in of_stage:
        holds[row, np.arange(row.size)] = True
    return holds


def held_by_ranks(dependencies: Dependencies, bytes: Floats) -> Floats:
    """[P, stages] bytes of the state of each stage that a rank holds. bytes: [stages]."""
    return np.asarray(np.where(_holds(dependencies), bytes.clip(0.0), 0.0))


def _reached(end: Floats, dependencies: Dependencies) -> Floats:
    """[gaps] when each rank comes to a gap: the end of the cell before it. end: [cells]."""
    first = dependencies.rank_start[:-1] + np.arange(dependencies.rank_start.size - 1)
    reached = np.zeros(end.size + first.size)
    reached[np.delete(np.arange(reached.size), first)] = end
    return reached


def _busy(step: StepWorks, reached: Floats, dependencies: Dependencies) -> Floats:
    """[gaps] time that the lane to the host is busy from each gap to the next one. reached: as of `_reached`."""
    placed, lanes = step.placed, step.lanes
    busy = np.zeros(reached.size)
    rows = np.flatnonzero(placed.works.lane == WorkLane.D2H)
    rank_of = placed.rank_of(placed.start, dependencies)
    for rank, last in enumerate(_last_gaps(dependencies).tolist()):
        first = int(dependencies.rank_start[rank]) + rank
        own = rows[rank_of[rows] == rank]
        if not own.size:
            continue
        begin, finish = lanes.begin[own], lanes.finish[own]
        edges = np.stack([begin, finish], axis=1).ravel()
        total = np.stack([np.cumsum(finish - begin) - (finish - begin), np.cumsum(finish - begin)], axis=1).ravel()
        until = np.interp(reached[first : last + 1], edges, total, left=0.0)
        busy[first:last] = np.diff(until)
    return busy


def _cut(dependencies: Dependencies, held: Floats, room: Floats) -> PlacedWorks:
    """The pieces of what ranks hold. held: [P, stages] bytes; room: [gaps] bytes that may start in each.

    What finds no room starts in the last gap of its rank.
    """
    rows: list[tuple[int, float, int, int]] = []
    for rank, last in enumerate(_last_gaps(dependencies).tolist()):
        first, total = int(dependencies.rank_start[rank]) + rank, float(held[rank].sum())
        if not total:
            continue
        filled = np.minimum(np.cumsum(np.minimum(room[first : last + 1], total)), total)
        filled[-1] = total
        stages = np.flatnonzero(held[rank])
        ends = np.cumsum(held[rank, stages])
        ends[-1] = total
        cuts = np.unique(np.concatenate([[0.0], filled, ends]))
        cuts = cuts[np.concatenate([[True], np.diff(cuts) > total * 1e-12])]
        cuts[-1] = total
        middle = (cuts[:-1] + cuts[1:]) / 2
        gap = first + np.searchsorted(filled, middle)
        stage = stages[np.searchsorted(ends, middle)]
        rows += zip(stage.tolist(), np.diff(cuts).tolist(), gap.tolist(), [last] * gap.size, strict=True)
    stage, bytes, start, join = (np.array(column) for column in zip(*rows, strict=True)) if rows else np.zeros((4, 0))
    kind = np.full(stage.size, WorkKind.SNAPSHOT, np.int8)
    minus = np.full(stage.size, -1, np.int32)
    return PlacedWorks.of(kind, stage.astype(np.int32), minus, bytes, start.astype(np.int64), join.astype(np.int64))
