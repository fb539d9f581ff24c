"""Puts the STARTs and JOINs of placed works into the streams of a program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.placed_works import DEFAULT_PLACES, PlacedWorks, WorkPlace
from schedc.ir.arrays import Int8, Int64, bincount
from schedc.ir.program import COLUMNS, InstructionKind, Program
from schedc.ir.works import WorkKind

_POSTED, _WAITED, _CLOSING, _PLACES = 0, 6, 8, 13
"""Places inside a gap of posts, of waits for messages, and of the cell or the reductions that close the gap."""
_OF_EVENT = np.array([1, 2, 3, 4, 5, 7, 9, 10, 11, 12])
"""Places inside a gap of STARTs and JOINs, by `schedc.analysis.placed_works.WorkPlace`."""


def insert_works(program: Program, dependencies: Dependencies, placed: PlacedWorks) -> Program:
    """The program with these works; all its instructions keep their order.

    dependencies: those of the schedule that the program was made from. Works add no wait between ranks, so a program
    that runs to its end still does. Works that the program has already stay where they are.
    """
    if not len(placed):
        return program
    if len(program.works):
        placed, program = placed_in(program).beside(placed), without_works(program)
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


def without_works(program: Program) -> Program:
    """The program without STARTs and JOINs."""
    kept = np.flatnonzero(program.work < 0)
    columns = {name: getattr(program, name)[kept] for name in ("kind", *COLUMNS)}
    rank_start = np.searchsorted(kept, program.rank_start)
    fields = {name: getattr(program, name) for name in _FIELDS}
    return Program(rank_start=rank_start, **fields, **columns)


def placed_in(program: Program) -> PlacedWorks:
    """The works of a program at the gaps and places of their STARTs and JOINs."""
    works = program.works
    computes = program.kind <= InstructionKind.CELL
    gap = np.cumsum(computes) - computes + program.rank
    reduces = np.cumsum(program.kind == InstructionKind.REDUCE)
    before = np.concatenate([[0], reduces])[program.rank_start[program.rank]]
    last = np.searchsorted(np.flatnonzero(computes), program.rank_start)[1:] + np.arange(program.ranks)

    def half(kind: InstructionKind, places: Int8) -> tuple[Int64, Int8]:
        rows = np.flatnonzero(program.kind == kind)
        rows = rows[np.argsort(program.work[rows])]
        behind = (gap[rows] == last[program.rank[rows]]) & (reduces[rows] > before[rows])
        return gap[rows].astype(np.int64), np.where(behind, _BEHIND[kind][works.kind], places[works.kind]).astype(
            np.int8
        )

    start, start_place = half(InstructionKind.START, DEFAULT_PLACES[0])
    join, join_place = half(InstructionKind.JOIN, DEFAULT_PLACES[1])
    return PlacedWorks(works, start, join, start_place, join_place)


_LATE = {WorkKind.SCATTER: (WorkPlace.SUM, WorkPlace.SUMMED), WorkKind.SPREAD: (WorkPlace.SPREAD, WorkPlace.CLOSE)}
"""Places of STARTs and JOINs behind the REDUCEs."""
_BEHIND = {
    kind: np.array([_LATE.get(work, DEFAULT_PLACES[:, work])[half] for work in WorkKind], np.int8)
    for half, kind in enumerate((InstructionKind.START, InstructionKind.JOIN))
}
"""The same, by kind of instruction: [kinds] of works."""


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
        return {
            "kind": np.where(events.joins, InstructionKind.JOIN, InstructionKind.START),
            "stage": works.stage[events.work],
            "microbatch": works.microbatch[events.work],
            "op": cell - first[rank],
            "phase": self.dependencies.schedule.phase[served],
            "span": self.dependencies.schedule.span[served],
            "work": events.work,
        }
