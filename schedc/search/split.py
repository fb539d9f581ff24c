"""Splits full backwards into I and W, so that W can move, and joins them where moving W gains nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Int64, repeat
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule

F, I, W, B = OpKind.F, OpKind.I, OpKind.W, OpKind.B  # noqa: E741

_TRIALS = 400
"""Most schedules that are simulated while backwards are joined."""


def split_backwards(schedule: Schedule) -> Schedule:
    """The schedule with every B replaced by an I and a W after it. A B in a pair becomes an I, which stays in it."""
    full = schedule.kind == B
    rows = repeat(np.arange(len(schedule)), 1 + full)
    added = np.append(False, rows[1:] == rows[:-1]) if rows.size else np.zeros(0, bool)
    kind, pair = schedule.kind[rows], schedule.pair[rows]
    kind[full[rows]] = I
    kind[added], pair[added] = W, -1
    return _rows(schedule, rows, kind, pair, np.append(0, np.cumsum(1 + full))[schedule.rank_start])


def join_backwards(schedule: Schedule, seed: Schedule, good: Callable[[Schedule], bool]) -> Schedule:
    """The schedule with I and W joined to the full backwards that the seed has, as far as it stays ``good``.

    Only an I outside of pairs with its W directly after it is joined. Candidates are tried all at once, then by halves.
    """
    whole = np.zeros((seed.stages, seed.microbatches), bool)
    whole[seed.stage[seed.kind == B], seed.microbatch[seed.kind == B]] = True
    kind, stage, microbatch = schedule.kind, schedule.stage, schedule.microbatch
    ours = (kind[:-1] == I) & (kind[1:] == W) & (stage[:-1] == stage[1:]) & (microbatch[:-1] == microbatch[1:])
    ours &= (schedule.pair[:-1] < 0) & (schedule.rank[:-1] == schedule.rank[1:])
    ours &= whole[stage[:-1], microbatch[:-1]]
    joined = np.zeros(0, np.int64)
    left = [np.flatnonzero(ours)]
    for _ in range(_TRIALS):
        if not left:
            break
        tried = left.pop()
        if tried.size and good(_joined(schedule, np.concatenate([joined, tried]))):
            joined = np.concatenate([joined, tried])
        elif tried.size > 1:
            left += [tried[: tried.size // 2], tried[tried.size // 2 :]]
    return _joined(schedule, joined) if joined.size else schedule


def _joined(schedule: Schedule, inputs: Int64) -> Schedule:
    """The schedule in which each of these I and the W in the next row become one B. inputs: [n] rows of I."""
    kind = schedule.kind.copy()
    kind[inputs] = B
    stays = np.ones(len(schedule), bool)
    stays[inputs + 1] = False
    rows = np.flatnonzero(stays)
    return _rows(schedule, rows, kind[rows], schedule.pair[rows], np.append(0, np.cumsum(stays))[schedule.rank_start])


def _rows(
    schedule: Schedule, rows: Int64, kind: npt.NDArray[np.int8], pair: npt.NDArray[np.int32], rank_start: Int64
) -> Schedule:
    """The schedule with other rows. rows: [ops] the old row that each new one copies."""
    columns = {name: getattr(schedule, name)[rows] for name in ("stage", "microbatch", "phase", "span")}
    return replace(schedule, rank_start=rank_start.astype(np.int64), kind=kind, pair=pair, **columns)
