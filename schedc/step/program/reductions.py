"""Which weight gradients are summed between two ranks: it follows from the placement and from the tied weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.arrays import Int64
from schedc.ir.op_tables import WEIGHT
from schedc.ir.schedule import Schedule
from schedc.ir.ties import exchanges_of, lies_apart


@dataclass(frozen=True)
class Reductions:
    """One per rank, stage and peer, by rank: first the copies of stages, by stage, then tied weights, tie by tie.

    Columns, each [reductions]: rank, stage, peer, sequence number, serving row, and the stage of the peer's copy (-1
    for a copy of the same stage).
    """

    rank: Int64
    stage: Int64
    peer: Int64
    sequence: Int64
    row: Int64
    stage2: Int64


def reductions_of(schedule: Schedule) -> Reductions:
    """Raises DiagnosticError: S302 for more than two copies of a stage, S303 for ties that cannot be summed."""
    place = schedule.placement
    if place.pipes > 2:
        message = f"stage 0 has {place.pipes} copies; gradients can be summed between two"
        raise DiagnosticError([Diagnostic("S302", message, help="use at most two pipes", source=schedule.source)])
    weights = np.flatnonzero(WEIGHT[schedule.kind])
    if (place.pipes < 2 and not schedule.tied) or not weights.size:
        return Reductions(*(np.zeros((6, 0), np.int64)))
    rank, stage, peer, stage2 = np.concatenate([_of_copies(schedule), _of_ties(schedule)], axis=1)
    last = np.zeros((place.ranks, place.stages), np.int64)
    last[schedule.rank[weights], schedule.stage[weights]] = weights  # ascending rows: the last one stays
    by_rank = np.argsort(rank, kind="stable")
    rank, stage, peer, stage2 = rank[by_rank], stage[by_rank], peer[by_rank], stage2[by_rank]
    return Reductions(rank, stage, peer, _count_up(rank * place.ranks + peer), last[rank, stage], stage2)


def _of_copies(schedule: Schedule) -> Int64:
    """[4, reductions] rank, stage, peer and -1 of the stages with copies on two ranks, by stage."""
    if schedule.placement.pipes < 2:
        return np.zeros((4, 0), np.int64)
    here, there = schedule.placement.rank_of_stage.astype(np.int64)
    apart = np.flatnonzero(here != there)
    ends = [(here[apart], apart, there[apart]), (there[apart], apart, here[apart])]
    columns = np.concatenate([np.stack([*end, np.full(apart.size, -1)]) for end in ends], axis=1)
    return np.asarray(columns[:, np.argsort(columns[1], kind="stable")], np.int64)


def _of_ties(schedule: Schedule) -> Int64:
    """[4, reductions] rank, stage, peer and the peer's stage of the exchanges of tied weights, tie by tie."""
    place = schedule.placement
    for tie in schedule.tied:
        if place.pipes > 1 and lies_apart(tie, place):
            stages = " and ".join(map(str, tie.stages))
            message = f"the stages {stages} are tied, have two copies each, and do not share their ranks"
            help = "tie stages that share both ranks, or take a schedule with one pipe"
            raise DiagnosticError([Diagnostic("S303", message, help=help, source=schedule.source)])
    ends = [(x.rank, x.stage, x.peer, x.peer_stage) for tie in schedule.tied for x in exchanges_of(tie, place)]
    return np.array(ends, np.int64).reshape(-1, 4).T


def _count_up(keys: Int64) -> Int64:
    """[n] how many equal keys come before each."""
    by_key = np.argsort(keys, kind="stable")
    ordered = keys[by_key]
    count = np.empty(keys.size, np.int64)
    count[by_key] = np.arange(keys.size) - np.searchsorted(ordered, ordered)
    return count
