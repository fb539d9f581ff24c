"""Tries numbers of places that stay free beside what moves, and stops a try when it is proved to lengthen the step.

Works only delay cells. So the lanes of a rank are at their earliest in a step where nobody else waits. A cell that
starts late there is at least as late in the step. With the longest path behind it this bounds the step from below.
Most tries that lengthen it are proved to by the first ranks, and nothing else of them is chosen. Where no cell of any
rank starts late, the step has the times of the one without moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int32
from schedc.step.dependencies import reduce_by_rank
from schedc.step.timeline import CellTimes
from schedc.step.works import offload_loops as loops
from schedc.step.works.place_offload import LaneSpeeds, MoveChoice, OffloadMoves, Stays, compiled

_ROUNDING = 1e-12
"""The part by which memory may exceed the room of a rank."""

_MORE = 8
"""How many times the ranks before a turn chooses for, beside one."""


@dataclass(frozen=True, eq=False)
class OffloadTry:
    """Moves that keep places free. fits: whether all cells have room. unchanged: whether all cells keep their times."""

    moves: OffloadMoves
    fits: bool
    unchanged: bool


@dataclass(frozen=True, eq=False)
class OffloadSearch:
    """A step whose ranks have room for so much. held: [cells] the most inside each. room: [P] memory."""

    cells: CellTimes
    stays: Stays
    speeds: LaneSpeeds
    held: Floats
    room: Floats

    def kept(self, places: int, limit: float = np.inf) -> OffloadTry | None:
        """The moves that keep so many places free, each of the largest activation of a rank.

        None where the step is proved to take longer than ``limit``.
        """
        choice = self._choice(places)
        least = self._choose(choice, limit)
        if least > limit:
            return None
        fits = bool((choice.held <= self.room[self.cells.dependencies.rank] * (1 + _ROUNDING)).all())
        return OffloadTry(choice.moves, fits, self._judged and not least)

    def _choice(self, places: int) -> MoveChoice:
        """Nothing is chosen yet. Ranks that fit move nothing."""
        reserved = np.where(self._fitting, np.inf, np.maximum(self.room - places * self._place, 0.0))
        most = np.where(self._fitting, np.inf, self.room)
        rank_start = self.cells.dependencies.rank_start
        return MoveChoice.of(rank_start, self.stays, self.held.copy(), reserved, most, self.speeds)

    @cached_property
    def _fitting(self) -> Bools:
        """[P] whether the rank has room for all that it holds."""
        peaks = reduce_by_rank(np.maximum, self.held, self.cells.dependencies.rank_start)
        return np.asarray(peaks <= self.room * (1 + _ROUNDING))

    @cached_property
    def _place(self) -> Floats:
        """[P] memory of the largest activation of each rank."""
        first = np.searchsorted(self.stays.made, self.cells.dependencies.rank_start)
        return np.asarray(reduce_by_rank(np.maximum, self.stays.bytes, first))

    @cached_property
    def _no_tail(self) -> Floats:
        """[cells] zeros in place of `_tail`, which is worked out where the first cell starts late."""
        return np.zeros(self.held.size)

    @cached_property
    def _space(self) -> tuple[Int32, Int32, Floats, Floats]:
        """Work space of `least_step`."""
        cells = self.held.size
        comes, follows = np.empty(cells, np.int32), np.empty(self.stays.made.size, np.int32)
        return comes, follows, np.empty(cells), np.empty(cells)

    @cached_property
    def _judged(self) -> bool:
        """Whether a loop can follow the lanes: they slow nothing down, and no cell makes two activations."""
        return not np.any(self.cells.slowdown > 0) and bool((np.diff(self.stays.made) > 0).all())

    @cached_property
    def _tail(self) -> Floats:
        """[cells] the longest path from the end of each cell to the end of the step."""
        known, tail = self.cells.dependencies, np.zeros(len(self.cells.dependencies))
        run = compiled(len(known))(loops.tails)
        producers = known.previous, known.producers, known.remote
        run(known.levels.order, *producers, self.cells.duration, self.cells.latency, tail)
        return tail

    def _choose(self, choice: MoveChoice, limit: float) -> float:
        """Chooses for all ranks, or until the step is proved to take longer than ``limit``.

        Gives the least that it takes, or 0 where no cell starts late or nobody can say.
        """
        ranks, least, low = self.room.size, 0.0, 0
        while low < ranks and least <= limit:
            high = min(ranks, _MORE * low + 1) if self._judged else ranks
            choice.choose(low, high)
            if self._judged and ("_tail" in vars(self) or self._least(choice, low, high, self._no_tail)):
                least = max(least, self._least(choice, low, high, self._tail))
            low = high
        return least

    def _least(self, choice: MoveChoice, low: int, high: int, tail: Floats) -> float:
        stays, speeds, rank_start = self.stays, self.speeds, self.cells.dependencies.rank_start
        run = compiled(int(rank_start[high] - rank_start[low]))(loops.least_step)
        least: float = run(
            low, high, rank_start, choice.first, stays.made, stays.used, stays.bytes, choice.left, choice.back,
            stays.by_use, speeds.start, self.cells.duration, tail, speeds.out, speeds.back, *self._space,
        )  # fmt: skip
        return least
