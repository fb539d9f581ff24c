"""Chooses which activations leave the device under a cap, and places their offloads and fetches between the cells.

In every cell that would exceed the cap, the activation leaves whose next use is farthest (Belady's rule, exact for
activations of one size). A fetch that could start only when its place becomes free would be fully exposed. So the
choice keeps some room, and offloads may then join later and fetches start earlier, as far as the cap allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int32, Int64, distinct, repeat
from schedc.ir.ops import OpKind
from schedc.ir.works import WorkKind
from schedc.step.dependencies import Dependencies, reduce_by_rank
from schedc.step.numba_kernels import kernels
from schedc.step.placed_works import PlacedWorks
from schedc.step.works import offload_loops as loops

_PYTHON_CELL = 5e-6
"""Seconds that the interpreted loops take for a cell, roughly: decides whether to load compiled loops."""


@dataclass(frozen=True, eq=False)
class Stays:
    """Activations between two uses on their rank, in the order of the cells that made them.

    made, used: [stays] the cell behind which an activation may leave, and the next cell that reads it. bytes: [stays]
    memory that would move. stage, microbatch: [stays]. No two are used by one cell.
    """

    made: Int32
    used: Int32
    stage: Int32
    microbatch: Int32
    bytes: Floats

    @cached_property
    def by_use(self) -> Int64:
        """[stays] their order by ``used``."""
        user = np.full(int(self.used.max(initial=-1)) + 1, -1)
        user[self.used] = np.arange(self.used.size)
        return user[user >= 0]

    def only(self, which: Bools | Int64) -> Stays:
        """These stays alone."""
        made, used, stage, microbatch = (x[which] for x in (self.made, self.used, self.stage, self.microbatch))
        return Stays(made, used, stage, microbatch, self.bytes[which])


@dataclass(frozen=True, eq=False)
class LaneSpeeds:
    """Times of the cells in a step without works, and of what moves.

    start, end: [cells]; out, back: time that a unit of memory takes to the host, and back.
    """

    start: Floats
    end: Floats
    out: float
    back: float


@dataclass(frozen=True, eq=False)
class OffloadMoves:
    """Stays that the host has in part.

    left: [moves] the first cell without it on the device. back: [moves] the cell in front of which its fetch starts.
    """

    stays: Stays
    left: Int32
    back: Int32

    def placed(self, dependencies: Dependencies) -> PlacedWorks:
        """The offload and the fetch of each move, at their gaps."""
        stays, rank = self.stays, dependencies.rank[self.stays.made]
        gaps = [column + rank for column in (stays.made + 1, self.left, self.back, stays.used)]
        kinds = [np.full(self.left.size, int(kind), np.int8) for kind in (WorkKind.OFFLOAD, WorkKind.FETCH)]
        stage, microbatch = (np.concatenate([column, column]) for column in (stays.stage, stays.microbatch))
        start, join = np.concatenate(gaps[::2]), np.concatenate(gaps[1::2])
        sizes = np.concatenate([stays.bytes, stays.bytes])
        return PlacedWorks.of(np.concatenate(kinds), stage, microbatch, sizes, start, join)


def stays_of(dependencies: Dependencies, held: Floats, until_recomputed: Floats) -> Stays:
    """The memory of each microbatch on its ranks between a forward and the next cell that reads it.

    held: [stages] memory held from a forward to its backward; until_recomputed: [stages] from a forward to its R.
    Between an R and its backward nothing moves.
    """
    schedule = dependencies.schedule
    kind, slots = schedule.kind, schedule.stages * schedule.microbatches
    used, recomputed = np.full(slots, -1, np.int32), np.zeros(slots, bool)
    for kinds, again in (((OpKind.B, OpKind.I), False), ((OpKind.R,), True)):
        for rows in (np.flatnonzero(kind == chosen) for chosen in kinds):
            slot = schedule.stage[rows] * schedule.microbatches + schedule.microbatch[rows]
            used[slot], recomputed[slot] = dependencies.cell_of[rows], again
    forward = np.flatnonzero(kind == OpKind.F)
    stage, microbatch = schedule.stage[forward], schedule.microbatch[forward]
    slot = stage * schedule.microbatches + microbatch
    size = held[stage]
    if recomputed.any():
        size = np.where(recomputed[slot], until_recomputed[stage], size)
    stays = Stays(dependencies.cell_of[forward], used[slot], stage, microbatch, size)
    moving = (size > 0) & (stays.used >= 0)
    return stays if moving.all() else stays.only(moving)


def choose_moves(
    rank_start: Int64, stays: Stays, held: Floats, room: Floats, most: Floats, speeds: LaneSpeeds
) -> OffloadMoves:
    """What leaves so that cells hold no more than ``room``; lowers ``held``, [cells] the most memory inside each.

    Each leaves in front of the first cell that lacks room, and is back in front of its use. A cell where nothing can
    leave stays above: the caller sees it in ``held``. Then offloads join later and fetches start earlier, by the time
    that lanes need in a step without waits, if ``most`` has room. A move that this makes needless is left out.
    rank_start: [P + 1] first cell of each rank. room, most: [P] memory.
    """
    choice = MoveChoice.of(rank_start, stays, held, room, most, speeds)
    choice.choose(0, room.size)
    return choice.moves


@dataclass(frozen=True, eq=False)
class MoveChoice:
    """What `choose_moves` chooses, rank by rank; arguments as there.

    first: [P + 1] first stay of each rank. left, back: [stays] as in `OffloadMoves`, for ranks that were chosen for; a
    stay moves where 0 <= left < back.
    """

    rank_start: Int64
    first: Int64
    stays: Stays
    held: Floats
    room: Floats
    most: Floats
    speeds: LaneSpeeds
    left: Int32
    back: Int32
    present: Int32
    latest: Floats

    @classmethod
    def of(
        cls, rank_start: Int64, stays: Stays, held: Floats, room: Floats, most: Floats, speeds: LaneSpeeds
    ) -> MoveChoice:
        """Nothing is chosen yet."""
        first, size = np.searchsorted(stays.made, rank_start), stays.made.size
        left, back = np.full(size, -1, np.int32), stays.used.copy()
        present, latest = np.empty(held.size, np.int32), np.empty(size)
        return cls(rank_start, first, stays, held, room, most, speeds, left, back, present, latest)

    def choose(self, low: int, high: int) -> None:
        """Chooses for the ranks ``low`` to ``high``, without ``high``."""
        stays, speeds = self.stays, self.speeds
        cells = int(self.rank_start[high] - self.rank_start[low])
        run = compiled(cells)
        run(loops.choose_moves_loop)(
            low, high, self.held, self.room, self.rank_start, self.first, stays.made, stays.used, stays.bytes,
            self.present, self.left,
        )  # fmt: skip
        run(loops.give_time)(
            low, high, self.held, self.most, self.first, stays.made, stays.used, stays.bytes, self.left, self.back,
            stays.by_use, speeds.start, speeds.end, speeds.out, speeds.back, self.latest,
        )  # fmt: skip

    @property
    def moves(self) -> OffloadMoves:
        """The moves, once all ranks are chosen for."""
        moving = np.flatnonzero((self.left >= 0) & (self.left < self.back))
        return OffloadMoves(self.stays.only(moving), self.left[moving], self.back[moving])


def compiled(cells: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorator of a loop over so many cells: compiles the loop where that saves time."""
    return kernels(cells * _PYTHON_CELL) or (lambda function: function)


@dataclass(frozen=True, eq=False)
class ByStage:
    """A step in which every stage of a rank is judged alone: the cells of a rank stand once for each of its stages.

    stays: in the order of ranks, their stages and cells. copy: [stays] the copy of its rank that each lies in.
    cells: [copied cells] the cell that each copies. first: [copies + 1] first copied cell of each copy. shift: [copies]
    how much larger the number of a copied cell is than that of its cell. stage: [copies].
    """

    stays: Stays
    copy: Int64
    cells: Int64
    first: Int64
    shift: Int64
    stage: Int64

    @classmethod
    def of(cls, dependencies: Dependencies, stays: Stays) -> ByStage:
        """The copies of the cells of all ranks that hold one of these stays."""
        stages = dependencies.schedule.stages
        key = dependencies.rank[stays.made].astype(np.int64) * stages + stays.stage
        copies, copy = distinct(key, (dependencies.rank_start.size - 1) * stages)
        order = np.argsort(copy.astype(np.min_scalar_type(copies.size)), kind="stable")
        start, end = (dependencies.rank_start[copies // stages + more] for more in (0, 1))
        first = np.concatenate([[0], np.cumsum(end - start)])
        shift = first[:-1] - start
        cells = np.arange(first[-1]) - repeat(shift, end - start)
        return cls(stays.only(order), copy[order], cells, first, shift, copies % stages)

    def moves(self, kept: Floats, on_the_way: float, speeds: LaneSpeeds) -> OffloadMoves:
        """What leaves so that no more than ``kept`` idle microbatches of a stage stay on the device. kept: [copies].

        on_the_way: how many more there may be while they are on their way.
        """
        stays, shift = self.stays, self.shift[self.copy].astype(np.int32)
        copied = replace(stays, made=stays.made + shift, used=stays.used + shift)
        idle = np.zeros(self.cells.size + 1)
        np.add.at(idle, copied.made + 1, stays.bytes)
        np.add.at(idle, copied.used, -stays.bytes)
        place = reduce_by_rank(np.maximum, stays.bytes, np.searchsorted(self.copy, np.arange(kept.size + 1)))
        of_cells = replace(speeds, start=speeds.start[self.cells], end=speeds.end[self.cells])
        held = np.cumsum(idle)[:-1]
        moves = choose_moves(self.first, copied, held, kept * place, (kept + on_the_way) * place, of_cells)
        back = self.shift[np.searchsorted(self.first, moves.stays.made, side="right") - 1].astype(np.int32)
        own = replace(moves.stays, made=moves.stays.made - back, used=moves.stays.used - back)
        return OffloadMoves(own, moves.left - back, moves.back - back)
