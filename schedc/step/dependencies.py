"""Finds the dependencies of every cell and the round in which it can run: one traversal for all analyses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Bools, Int32, Int64, reduceat, repeat
from schedc.ir.op_tables import BACKWARD
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.step.numba_kernels import Compile, kernels, lockstep

_NUMPY_ROUND = 3.3e-6
"""Seconds that numpy takes for a round of all ranks, roughly: what decides whether to load the compiled loop."""


@dataclass(frozen=True, eq=False)
class Dependencies:
    """The cells of a schedule and what each waits for.

    A cell is one op, or the two ops of an overlapped pair. Cells are numbered rank by rank, in order: those of
    rank r are rank_start[r] ..< rank_start[r + 1]. A cell also needs ops of its own stage on its own rank:
    F for B and I, I for W, F for R, R for B and I. Such an op comes earlier in the rank's order, as
    `schedc.ir.verify` checks, so ``previous`` covers it.

    schedule: what this was made from.
    first, second: [cells] rows of the ops; second is that of a pair, else -1.
    cell_of: [ops] cell of each op.
    rank: [cells]; rank_start: [P + 1].
    previous: [cells] the cell before it on its rank, else -1.
    producers: [2, cells] the cells on whose output a cell waits, -1 where it waits for none. Row 0: for its forward,
        F of the stage before. Row 1: for its backward, B or I of the stage after.
    remote: [2, cells] whether that producer is on another rank, which costs a message.
    """

    schedule: Schedule
    first: Int32
    second: Int32
    cell_of: Int32
    rank: Int32
    rank_start: Int64
    previous: Int32
    producers: Int32
    remote: Bools

    @classmethod
    def of(cls, schedule: Schedule) -> Dependencies:
        """The dependencies of a schedule that `schedc.ir.verify.verify` found nothing wrong with.

        Where an op is missing nothing waits for it; of an op that runs twice the last one counts.
        """
        second_row = _second_of_pair(schedule)
        cell_of = np.cumsum(~second_row, dtype=np.int32) - 1
        first = np.flatnonzero(~second_row).astype(np.int32)
        second = np.full(first.size, -1, np.int32)
        second[cell_of[second_row]] = np.flatnonzero(second_row)
        rank_start = np.searchsorted(first, schedule.rank_start)
        previous = np.arange(-1, first.size - 1, dtype=np.int32)
        starts = rank_start[:-1][rank_start[:-1] < rank_start[1:]]
        previous[starts] = -1
        rank = schedule.rank[first]
        producers = _producers(schedule, cell_of, first.size)
        remote = np.zeros(producers.shape, bool)
        for row, producer in enumerate(producers if first.size else ()):
            remote[row] = (producer >= 0) & (rank[producer] != rank)
        return cls(schedule, first, second, cell_of, rank, rank_start, previous, producers, remote)

    def __len__(self) -> int:
        return int(self.first.size)

    @cached_property
    def sends_activation(self) -> Bools:
        """[cells] whether the output of the cell's forward leaves the rank as a message."""
        sends = np.zeros(len(self), bool)
        sends[self.producers[0][self.remote[0]]] = True
        return sends

    @property
    def pairs(self) -> Bools:
        """[cells] whether the cell is an overlapped pair."""
        return self.second >= 0

    @property
    def with_backward(self) -> Bools:
        """[cells] whether the cell is a pair with a backward second: the pairs that the cost FB is about."""
        return np.asarray(self.pairs & BACKWARD[self.schedule.kind[self.second]])

    @cached_property
    def backward(self) -> Int32:
        """[cells] row of the backward of the cell, B or I; -1 where it has none."""
        kind = self.schedule.kind
        alone = np.where(BACKWARD[kind[self.first]], self.first, np.int32(-1))
        return np.where(self.with_backward, self.second, alone)

    @cached_property
    def levels(self) -> Levels:
        return _lockstep(self)


@dataclass(frozen=True, eq=False)
class Levels:
    """The cells in an order with every cell behind all cells that it waits for.

    order: [reached] cells, level by level and within a level by rank: a topological order of the cells.
    start: [levels + 1] level l is order[start[l]] ..< order[start[l + 1]].
    of: [cells] the longest chain of cells before it, counted in cells; -1 for a cell that can never run.
    stuck: cells at which ranks block for ever, one per such rank; empty without a deadlock.
    """

    order: Int32
    start: Int64
    of: Int32
    stuck: Int32

    def __len__(self) -> int:
        return int(self.start.size - 1)


def needs_of(schedule: Schedule) -> Int64:
    """[2, ops] rows of the ops that each op needs: an op of its own stage, and an op of a neighbour.

    -1 where it needs none, and the number of ops where the schedule lacks the op. The first counts of ops that run
    twice. The schedule need not be legal.
    """
    kind, stage, microbatch, ops = schedule.kind, schedule.stage, schedule.microbatch, len(schedule)
    forward, backward, weight = kind == OpKind.F, BACKWARD[kind], kind == OpKind.W
    row = np.full((3, schedule.stages + 2, schedule.microbatches), ops)
    row[:, [0, -1]] = -1
    for table, chosen in zip(row, (forward, backward, kind == OpKind.I), strict=True):
        rows = np.flatnonzero(chosen)[::-1]
        table[stage[rows] + 1, microbatch[rows]] = rows
    before, own, behind = (row[:, stage + step, microbatch] for step in range(3))
    return np.stack(
        [
            np.select([forward, weight], [-1, own[2]], own[0]),
            np.select([forward, backward], [before[0], behind[1]], -1),
        ]
    )


def _second_of_pair(schedule: Schedule) -> Bools:
    """[ops] whether the op is the second of a pair."""
    second = np.zeros(len(schedule), bool)
    second[1:] = (schedule.pair[1:] >= 0) & (schedule.pair[1:] == schedule.pair[:-1])
    second[schedule.rank_start[:-1][schedule.rank_start[:-1] < len(schedule)]] = False
    return second


def _producers(schedule: Schedule, cell_of: Int32, cells: int) -> Int32:
    """[2, cells] by scatter and gather over tables [stages + 2, microbatches] of who computes what.

    The tables have a row of -1 before the first stage and one after the last: no cell waits for a stage outside of the
    model.
    """
    producers = np.full((2, cells), -1, np.int32)
    backward = BACKWARD[schedule.kind]
    for row, chosen, step in ((0, schedule.kind == OpKind.F, -1), (1, backward, +1)):
        ops = np.flatnonzero(chosen)
        cell, slot = cell_of[ops], schedule.stage[ops] + 1
        table = np.full((schedule.stages + 2, schedule.microbatches), -1, np.int32)
        table[slot, schedule.microbatch[ops]] = cell
        producers[row, cell] = table[slot + step, schedule.microbatch[ops]]
    return producers


def _lockstep(dependencies: Dependencies) -> Levels:
    """Runs all ranks at once: in every round each rank whose next cell is ready runs it, and only that.

    With every cell taking one round, a cell runs in the round after the last of those that it waits for: the
    round is its level. A round costs a few array operations over the ranks, however many are ready.
    Ranks that no round advances wait for ever.
    """
    cells, ranks = len(dependencies), dependencies.rank_start.size - 1
    if loops := kernels(int(np.diff(dependencies.rank_start).max(initial=0)) * _NUMPY_ROUND):
        return _compiled_lockstep(loops, dependencies)
    # Behind every rank's last cell stands a wall, a cell that waits for itself: a finished rank never is ready.
    # Slot i of a cell is its number plus the walls before it; the last slot is "nothing to wait for", done.
    slot = np.arange(cells) + dependencies.rank
    waits = np.full((2, cells + ranks + 1), cells + ranks)
    waits[:, dependencies.rank_start[1:] + np.arange(ranks)] = dependencies.rank_start[1:] + np.arange(ranks)
    waits[:, slot] = np.where(dependencies.producers >= 0, slot[dependencies.producers], cells + ranks)
    done = np.zeros(cells + ranks + 1, bool)
    done[-1] = True
    head = dependencies.rank_start[:-1] + np.arange(ranks)
    rounds = []
    while True:
        ready = np.logical_and.reduce(done.take(waits.take(head, axis=1)), axis=0)
        running = head[ready]
        if not running.size:
            break
        done[running] = True
        head += ready
        rounds.append(running)
    cell_at = np.zeros(cells + ranks, np.int32)
    cell_at[slot] = np.arange(cells)
    order = cell_at[np.concatenate(rounds)] if rounds else np.zeros(0, np.int32)
    counts = np.fromiter(map(len, rounds), np.int64, len(rounds))
    of = np.full(cells, -1, np.int32)
    of[order] = repeat(np.arange(counts.size), counts)
    stuck = cell_at[head[waits[0, head] != head]] if cells else order
    return Levels(order, np.concatenate([[0], np.cumsum(counts)]), of, stuck)


def _compiled_lockstep(loops: Compile, dependencies: Dependencies) -> Levels:
    cells = len(dependencies)
    order, of, start = np.empty(cells, np.int32), np.full(cells, -1, np.int32), np.zeros(cells + 1, np.int64)
    head = dependencies.rank_start[:-1].copy()
    rounds = loops(lockstep)(dependencies.producers, dependencies.rank_start, order, of, start, head)
    start = start[: rounds + 1].copy()
    stuck = head[head < dependencies.rank_start[1:]].astype(np.int32)
    return Levels(order[: start[-1]], start, of, stuck)


def reduce_by_rank(ufunc: np.ufunc, values: npt.NDArray[Any], rank_start: Int64) -> npt.NDArray[Any]:
    """[P, ...] ``ufunc`` reduced over the rows of each rank; 0 for a rank without any."""
    result = np.zeros((rank_start.size - 1, *values.shape[1:]), values.dtype)
    filled = rank_start[:-1] < rank_start[1:]
    if filled.any():
        result[filled] = reduceat(ufunc, values, rank_start[:-1][filled], axis=0)
    return result
