"""Puts the STARTs and JOINs of placed works into the streams of a program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.placed_works import PlacedWorks
from schedc.ir.arrays import Int8, Int64, bincount
from schedc.ir.program import InstructionKind, Program

_POSTED, _WAITED, _CLOSING, _PLACES = 0, 5, 7, 8
"""Places inside a gap of posts, of waits for messages, and of the cell or the reductions that close the gap."""
_OF_EVENT = np.array([1, 2, 3, 6])
"""Places inside a gap of STARTs and JOINs, by `schedc.analysis.placed_works.Events.place`."""


def insert_works(program: Program, dependencies: Dependencies, placed: PlacedWorks) -> Program:
    """The program with these works; all its instructions keep their order.

    dependencies: those of the schedule that the program was made from. Works add no wait between ranks, so a program
    that runs to its end still does.
    """
    if not len(placed):
        return program
    events = placed.events
    computes = program.kind <= InstructionKind.CELL
    gap = np.cumsum(computes) - computes + program.rank
    row = np.searchsorted(gap * _PLACES + _places(program.kind), events.gap * _PLACES + _OF_EVENT[events.place])
    columns = _Inserted(program, dependencies, placed, row)
    counts = bincount(placed.rank_of(events.gap, dependencies), minlength=program.ranks)
    fields = {name: value for name, value in vars(program).items() if name in _FIELDS}
    rank_start = program.rank_start + np.concatenate([[0], np.cumsum(counts)])
    kept = fields | {"rank_start": rank_start, "kind": columns.column("kind")}
    return Program.derived(columns, **kept, works=placed.works, work=columns.column("work"))


_FIELDS = (
    "name", "sizes", "placement", "phases", "spans", "doc", "source_name", "layout", "layers", "plan", "tied", "source",
)  # fmt: skip
"""The fields of a program that works leave as they are."""


def _places(kind: Int8) -> Int8:
    """[n] the place of each instruction inside its gap; it never descends there."""
    places = np.full(len(InstructionKind), _CLOSING, np.int8)
    places[[InstructionKind.SEND, InstructionKind.RECV]] = _POSTED
    places[InstructionKind.WAIT] = _WAITED
    return np.asarray(places[kind])


@dataclass(frozen=True, eq=False)
class _Inserted:
    """The columns of a program with works, each made when it is read. row: [events] rows that they stand before."""

    program: Program
    dependencies: Dependencies
    placed: PlacedWorks
    row: Int64

    def column(self, name: str) -> npt.NDArray[Any]:
        """[n] the column of this name."""
        own = getattr(self.program, name)
        return np.insert(own, self.row, self._added.get(name, np.int8(-1)))

    @cached_property
    def _added(self) -> dict[str, npt.NDArray[Any]]:
        """The columns of the STARTs and JOINs that are not -1, [events]."""
        events, works, first = self.placed.events, self.placed.works, self.dependencies.rank_start
        rank = self.placed.rank_of(events.gap, self.dependencies)
        cell = np.minimum(events.gap - rank, first[rank + 1] - 1)
        served = self.dependencies.first[cell]
        joins = (events.place & 1).astype(bool)
        return {
            "kind": np.where(joins, InstructionKind.JOIN, InstructionKind.START),
            "stage": works.stage[events.work],
            "microbatch": works.microbatch[events.work],
            "op": cell - first[rank],
            "phase": self.dependencies.schedule.phase[served],
            "span": self.dependencies.schedule.span[served],
            "work": events.work,
        }
