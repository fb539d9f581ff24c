"""Peaks of memory under many costs at once: the counts of what each rank holds, found once for an order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Bools, Floats, Int32, Int64, distinct
from schedc.ir.recomputed import recomputed_ops
from schedc.ir.schedule import Schedule
from schedc.step.dependencies import Dependencies
from schedc.step.memory import memory_changes

_CHANGES = np.concatenate([memory_changes(*row) for row in np.eye(4)[..., np.newaxis]], axis=2).astype(np.int32)
"""[2, kinds, parts] how many an op adds of each part: activation, pending weight gradient, recomputed, restored."""


class RankCounts(NamedTuple):
    """What a rank holds at those places of its order where no other place holds as much of everything.

    counts: [rows, held] microbatches. held: [held] part * stages + stage of what a column counts.
    """

    counts: Floats
    held: Int64


@dataclass(frozen=True, eq=False)
class PeakCounts:
    """The rows of every rank, from which its peak follows for any costs: the largest of ``counts @ costs``.

    A steady phase holds the same again and again, so that rows are few: on 16 ranks 1 for ``1f1b``, and 17 for
    ``dualpipev``.
    """

    ranks: tuple[RankCounts, ...]
    stages: int

    @classmethod
    def of(cls, dependencies: Dependencies) -> PeakCounts:
        """The rows of a verified schedule. They depend on the order of its ops alone."""
        schedule = dependencies.schedule
        change = _CHANGES[recomputed_ops(schedule).astype(np.int8), schedule.kind]
        used = np.flatnonzero(change.any(axis=0))
        change = change[:, used]
        limit = schedule.ranks * schedule.stages
        places, number = distinct(schedule.rank * np.int64(schedule.stages) + schedule.stage, limit)
        first = np.searchsorted(places, np.arange(schedule.ranks + 1) * schedule.stages)
        column = (number - first[schedule.rank])[:, np.newaxis] * used.size + np.arange(used.size)
        rows = _distinct_rows(schedule, _held(schedule, column, change), _may_peak(schedule, change))
        ranks = []
        for own, (low, high) in zip(rows, pairwise(first.tolist()), strict=True):
            held = used * schedule.stages + (places[low:high] % schedule.stages)[:, np.newaxis]
            ranks.append(RankCounts(_undominated(own[:, : held.size]).astype(np.float64), held.ravel()))
        return cls(tuple(ranks), schedule.stages)

    def peaks(
        self,
        activation: Floats,
        pending: Floats,
        recomputed: Floats | None = None,
        restored: Floats | None = None,
    ) -> Floats:
        """[P, K] peaks of K costs: ``peak_memory`` of `schedc.step.memory.measure_memory`, but for rounding.

        activation, pending, recomputed, restored: [K, stages] memory of a microbatch, at least 0, as in `Costs`. By
        default recomputed is 0 and restored is ``activation``.
        """
        if activation.ndim != 2 or activation.shape[1] != self.stages or activation.shape != pending.shape:
            raise CompilerBug("costs", f"activations {activation.shape} for {self.stages} stages")
        part = np.zeros_like(activation) if recomputed is None else recomputed
        whole = activation if restored is None else restored
        costs = np.concatenate([activation, pending, part, whole], axis=1).T
        return np.stack([np.max(rank.counts @ costs[rank.held], axis=0, initial=0.0) for rank in self.ranks])


def _held(schedule: Schedule, column: Int64, change: Int32) -> Int32:
    """[columns, ops] what the rank of an op holds after it.

    column, change: [ops, parts] the columns of the op's stage, and what the op adds there.
    """
    ops = np.arange(len(schedule))
    total = np.zeros((int(column.max(initial=-1)) + 1, ops.size + 1), np.int32)
    total[column.T, ops + 1] = change.T
    np.cumsum(total, axis=1, out=total)
    return np.asarray(total[:, 1:] - total[:, schedule.rank_start[schedule.rank]])


def _may_peak(schedule: Schedule, change: Int32) -> Bools:
    """[ops] whether a rank may hold most after an op: the op adds something, and no op that only adds comes next.

    change: [ops, parts] what an op adds.
    """
    adds, frees = (np.logical_or.reduce(sign, axis=1) for sign in (change > 0, change < 0))
    more = np.zeros(len(schedule), bool)
    more[:-1] = adds[1:] & ~frees[1:] & (schedule.rank[1:] == schedule.rank[:-1])
    return np.asarray(adds & ~more)


def _distinct_rows(schedule: Schedule, held: Int32, chosen: Bools) -> list[Int32]:
    """[P] of [rows, columns]: what each rank holds after the chosen ops, every row once.

    held: [columns, ops]; chosen: [ops].
    """
    places = np.flatnonzero(chosen)
    code, limit = schedule.rank[places].astype(np.int64), schedule.ranks
    for counts in held[:, places]:
        width = int(counts.max(initial=0)) + 1
        found, code = distinct(code * width + counts, limit * width)
        limit = found.size
    one = np.zeros(limit if places.size else 0, np.int64)
    one[code] = places
    return [held[:, one[schedule.rank[one] == rank]].T for rank in range(schedule.ranks)]


def _undominated(rows: Int32) -> Int32:
    """The rows than which no other one is at least as large in every column. rows: [rows, columns], all different."""
    kept = []
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    while len(rows):
        kept.append(rows[0])
        rows = rows[(rows > rows[0]).any(axis=1)]
    return np.stack(kept) if kept else rows
