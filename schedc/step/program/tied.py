"""Adds the exchanges of tied weights to a program: the model is known only when a pipeline is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from schedc.ir.arrays import bincount
from schedc.ir.program import EVERY_COLUMN, InstructionKind, Program, computation
from schedc.ir.ties import Tie
from schedc.step.program.reductions import reductions_of


def with_tied(program: Program, tied: Sequence[Tie]) -> Program:
    """The program with these ties in place of its own: a REDUCE for each exchange, at the end of the streams.

    All other instructions stay as they are, in their order. Raises DiagnosticError (S303) for ties that the placement
    does not allow.
    """
    ties = tuple(tied)
    if ties == program.tied:
        return program
    program = _without_ties(program)
    schedule, row_of = computation(program)
    sums = reductions_of(replace(schedule, tied=ties))
    added = np.flatnonzero(sums.stage2 >= 0)
    if not added.size:
        return replace(program, tied=ties)
    serving = row_of[sums.row[added]]
    values = {name: np.full(added.size, -1) for name in EVERY_COLUMN} | {
        "kind": np.full(added.size, InstructionKind.REDUCE),
        "stage": sums.stage[added], "stage2": sums.stage2[added], "peer": sums.peer[added],
        "message": sums.sequence[added], "phase": program.phase[serving], "span": program.span[serving],
    }  # fmt: skip
    rank = sums.rank[added]
    ends = program.rank_start[rank + 1]
    columns: dict[str, Any] = {name: np.insert(getattr(program, name), ends, values[name]) for name in values}
    grown = np.concatenate([[0], np.cumsum(bincount(rank, minlength=program.ranks))])
    return replace(program, tied=ties, rank_start=program.rank_start + grown, **columns)


def _without_ties(program: Program) -> Program:
    """The program without ties and without their exchanges."""
    if not program.tied:
        return program
    kept = np.flatnonzero((program.kind != InstructionKind.REDUCE) | (program.stage2 < 0))
    columns: dict[str, Any] = {name: getattr(program, name)[kept] for name in ("kind", *EVERY_COLUMN)}
    return replace(program, tied=(), rank_start=np.searchsorted(kept, program.rank_start), **columns)
