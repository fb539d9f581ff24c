"""Puts the STARTs and JOINs of placed works into the streams of a program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.placed_works import PlacedWorks
from schedc.ir.arrays import Int8, Int64, bincount
from schedc.ir.program import EVERY_COLUMN, InstructionKind, Program

_POSTED, _WAITED, _CLOSING = 0, 5, 7
"""Places inside a gap of posts, of waits for messages, and of the cell or the reductions that close the gap."""
_OF_EVENT = np.array([1, 2, 3, 6], np.int8)
"""Places inside a gap of STARTs and JOINs, by `schedc.analysis.placed_works.Events.place`."""


def insert_works(program: Program, dependencies: Dependencies, placed: PlacedWorks) -> Program:
    """The program with these works; all its instructions keep their order.

    dependencies: those of the schedule that the program was made from. Works add no wait between ranks, so a program
    that runs to its end still does.
    """
    if not len(placed):
        return program
    compute = np.flatnonzero(program.kind <= InstructionKind.CELL)
    gap = np.searchsorted(compute, np.arange(len(program))) + program.rank
    events = placed.events
    place = np.concatenate([_place(program.kind), _OF_EVENT[events.place]])
    order = np.lexsort((place, np.concatenate([gap, events.gap])))
    added = _rows(program, dependencies, placed, compute)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(program, name), added[name]])[order].astype(getattr(program, name).dtype)
        for name in ("kind", *EVERY_COLUMN)
    }
    counts = bincount(placed.rank_of(events.gap, dependencies), minlength=program.ranks)
    rank_start = program.rank_start + np.concatenate([[0], np.cumsum(counts)])
    return replace(program, works=placed.works, rank_start=rank_start, **columns)


def _place(kind: Int8) -> Int8:
    """[n] the place of each instruction inside its gap."""
    places = np.full(kind.size, _CLOSING, np.int8)
    places[(kind == InstructionKind.SEND) | (kind == InstructionKind.RECV)] = _POSTED
    places[kind == InstructionKind.WAIT] = _WAITED
    return places


def _rows(program: Program, dependencies: Dependencies, placed: PlacedWorks, compute: Int64) -> dict[str, Int64]:
    """The columns of the STARTs and JOINs, in the order of `PlacedWorks.events`. compute: [cells] rows of the cells."""
    events, works = placed.events, placed.works
    rank = placed.rank_of(events.gap, dependencies)
    cell = np.minimum(events.gap - rank, dependencies.rank_start[rank + 1] - 1)
    serving = compute[cell]
    joins = (events.place & 1).astype(bool)
    return {name: np.full(events.work.size, -1) for name in EVERY_COLUMN} | {
        "kind": np.where(joins, InstructionKind.JOIN, InstructionKind.START),
        "stage": works.stage[events.work],
        "microbatch": works.microbatch[events.work],
        "op": cell - dependencies.rank_start[rank],
        "phase": program.phase[serving],
        "span": program.span[serving],
        "work": events.work,
    }
