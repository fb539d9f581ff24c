"""Chooses which activations leave the device under a cap, and places their offloads and fetches between the cells.

In every cell that would exceed the cap, the activation leaves whose next use is farthest (Belady's rule, exact for
activations of one size). A fetch that could start only when its place becomes free would be fully exposed. So the
choice keeps some room, and offloads may then join later and fetches start earlier, as far as the cap allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.placed_works import PlacedWork
from schedc.ir.arrays import Floats
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.works import WorkKind, WorkLane, WorkRow


class Stay(NamedTuple):
    """Activations between two cells of their rank that use them. Cells are numbered from 0 on the rank.

    made, used: the cell behind which they may leave, and the one that reads them next. bytes: what would move.
    """

    made: int
    used: int
    stage: int
    microbatch: int
    bytes: float


@dataclass
class Move:
    """A stay that the host has in part. left: the first cell without it on the device; back: the cell in front of
    which its fetch starts."""

    stay: Stay
    left: int
    back: int


@dataclass(frozen=True, eq=False)
class RankTimes:
    """Times of a rank's cells in a step without works, and of what moves.

    start, end: [cells]; out, back: time that a unit of memory takes to the host, and back.
    """

    start: Floats
    end: Floats
    out: float
    back: float


def stays_of(dependencies: Dependencies, rank: int, held: Floats, until_recomputed: Floats) -> list[Stay]:
    """What a rank holds of each microbatch between two cells that use it.

    held: [stages] memory held from a forward to its backward; until_recomputed: [stages] from a forward to its R.
    Between an R and its backward nothing moves.
    """
    schedule, low = dependencies.schedule, int(dependencies.rank_start[rank])
    rows = slice(int(schedule.rank_start[rank]), int(schedule.rank_start[rank + 1]))
    kinds, stages, microbatches = schedule.kind[rows], schedule.stage[rows], schedule.microbatch[rows]
    cells = dependencies.cell_of[rows] - low
    made: dict[tuple[int, int], int] = {}
    stays = []
    columns = (kinds.tolist(), stages.tolist(), microbatches.tolist(), cells.tolist())
    for kind, stage, microbatch, cell in zip(*columns, strict=True):
        if kind == OpKind.F:
            made[stage, microbatch] = cell
        elif (kind == OpKind.R or BACKWARD[kind]) and (stage, microbatch) in made:
            size = float((until_recomputed if kind == OpKind.R else held)[stage])
            stay = Stay(made.pop((stage, microbatch)), cell, stage, microbatch, size)
            if size > 0:
                stays.append(stay)
    return stays


def choose_moves(held: Floats, stays: Iterable[Stay], cap: float) -> list[Move]:
    """What leaves so that cells hold no more than ``cap``; lowers ``held``, [cells] the most memory inside each.

    Each leaves in front of the first cell that lacks room, and is back in front of its use. A cell where nothing can
    leave stays above the cap: the caller sees it in ``held``.
    """
    waiting = sorted(stays, reverse=True)
    present: list[tuple[int, Stay]] = []
    moves = []
    for cell in range(held.size):
        while waiting and waiting[-1].made < cell:
            stay = waiting.pop()
            heappush(present, (-stay.used, stay))
        while held[cell] > cap * (1 + 1e-12) and present and -present[0][0] > cell:
            _, stay = heappop(present)
            held[cell : stay.used] -= stay.bytes
            moves.append(Move(stay, cell, stay.used))
    return moves


def give_time(moves: Sequence[Move], held: Floats, cap: float, times: RankTimes) -> list[Move]:
    """The moves with later JOINs of offloads and earlier STARTs of fetches, where ``cap`` has room.

    Raises ``held``, [cells] the most memory inside each.
    Nothing moves longer than the lanes need in a step without waits. A move that room makes needless is left out.
    """
    most = cap * (1 + 1e-12)
    free = 0.0
    for move in sorted(moves, key=lambda move: move.stay):
        stay = move.stay
        free = max(free, times.end[stay.made]) + stay.bytes * times.out
        while move.left < move.back and times.end[move.left - 1] < free and held[move.left] + stay.bytes <= most:
            held[move.left] += stay.bytes
            move.left += 1
    moves = [move for move in moves if move.left < move.back]
    latest: dict[int, float] = {}
    before = np.inf
    by_use = sorted(range(len(moves)), key=lambda i: moves[i].stay.used)
    for i in reversed(by_use):
        before = min(times.start[moves[i].stay.used], before) - moves[i].stay.bytes * times.back
        latest[i] = before
    for i in by_use:
        move = moves[i]
        size = move.stay.bytes
        while move.left < move.back and times.end[move.back - 1] > latest[i] and held[move.back - 1] + size <= most:
            move.back -= 1
            held[move.back] += size
    return [move for move in moves if move.left < move.back]


def works_of(moves: Iterable[Move], dependencies: Dependencies, rank: int) -> Iterator[PlacedWork]:
    """The offload and the fetch of each move of a rank, at their gaps."""
    gap = int(dependencies.rank_start[rank]) + rank
    for move in moves:
        _, _, stage, microbatch, size = move.stay
        offload = WorkRow(WorkKind.OFFLOAD, WorkLane.D2H, stage, microbatch, size)
        fetch = WorkRow(WorkKind.FETCH, WorkLane.H2D, stage, microbatch, size)
        yield PlacedWork(offload, gap + move.stay.made + 1, gap + move.left)
        yield PlacedWork(fetch, gap + move.back, gap + move.stay.used)
