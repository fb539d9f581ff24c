"""Which weight gradients are to be summed between two ranks: it follows from the placement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.arrays import Int64
from schedc.ir.op_tables import WEIGHT
from schedc.ir.schedule import Schedule


@dataclass(frozen=True)
class Reductions:
    """One per rank and stage, by rank and then stage.

    Columns, each [reductions]: rank, stage, peer, sequence number, serving row.
    """

    rank: Int64
    stage: Int64
    peer: Int64
    sequence: Int64
    row: Int64


def reductions_of(schedule: Schedule) -> Reductions:
    place = schedule.placement
    if place.pipes > 2:
        message = f"stage 0 has {place.pipes} copies; gradients can be summed between two"
        raise DiagnosticError([Diagnostic("S302", message, help="use at most two pipes", source=schedule.source)])
    weights = np.flatnonzero(WEIGHT[schedule.kind])
    if place.pipes < 2 or not weights.size:
        return Reductions(*(np.zeros((5, 0), np.int64)))
    here, there = place.rank_of_stage.astype(np.int64)
    apart = np.flatnonzero(here != there)
    rank = np.concatenate([here[apart], there[apart]])
    peer = np.concatenate([there[apart], here[apart]])
    stage = np.tile(apart, 2)
    last = np.zeros((place.ranks, place.stages), np.int64)
    last[schedule.rank[weights], schedule.stage[weights]] = weights  # ascending rows: the last one stays
    by_rank = np.lexsort((stage, rank))
    rank, peer, stage = rank[by_rank], peer[by_rank], stage[by_rank]
    return Reductions(rank, stage, peer, _count_up(rank * place.ranks + peer), last[rank, stage])


def _count_up(keys: Int64) -> Int64:
    """[n] how many equal keys come before each."""
    by_key = np.argsort(keys, kind="stable")
    ordered = keys[by_key]
    count = np.empty(keys.size, np.int64)
    count[by_key] = np.arange(keys.size) - np.searchsorted(ordered, ordered)
    return count
