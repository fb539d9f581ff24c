"""Puts the STARTs and JOINs of placed works into the streams of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Floats, Int8, Int64
from schedc.ir.program import COLUMNS, InstructionKind, Program
from schedc.ir.works import WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.numba_kernels import kernels
from schedc.step.placed_works import DEFAULT_PLACES, Events, PlacedWorks, WorkPlace
from schedc.step.program import loops
from schedc.step.program.queues import queued_messages

_POSTED, _WAITED, _CLOSING, _PLACES = 0, 6, 8, 13
"""Places inside a gap of posts, of waits for messages, and of the cell or the reductions that close the gap."""
_OF_EVENT = np.array([1, 2, 3, 4, 5, 7, 9, 10, 11, 12], np.int8)
"""Places inside a gap of STARTs and JOINs, by `schedc.step.placed_works.WorkPlace`."""

_NUMPY_ROW = 4e-8
"""Seconds that numpy takes for an instruction, roughly: what decides whether to load the compiled loop."""


def insert_works(
    program: Program,
    dependencies: Dependencies,
    placed: PlacedWorks,
    time: Floats | None = None,
    costs: Costs | None = None,
    duration: Floats | None = None,
) -> Program:
    """The program with more works; all other instructions keep their order.

    dependencies: those of the schedule that the program was made from. Works add no wait between ranks, so a program
    that runs to its end still does. Works that the program has already stay where they are.
    costs: those of the stages, by which communicators are chosen again; without them the program keeps its own.
    time: [works] on the lanes; duration: [cells] from inside, as of `queued_messages`. Such a program has no
    works before.
    """
    if not len(placed):
        return program
    if len(program.works):
        placed, program = placed_in(program).beside(placed), without_works(program)
    slot, kind = _merged(program, placed.events)
    columns = _Inserted(program, dependencies, placed, slot)
    work = np.full(kind.size, -1, np.int32)
    work[slot] = placed.events.work
    first = dependencies.rank_start + np.arange(program.ranks + 1)
    rank_start = program.rank_start + np.searchsorted(placed.events.gap, first)
    fields = {name: value for name, value in vars(program).items() if name in _FIELDS}
    more = {"rank_start": rank_start, "kind": kind, "works": placed.works, "work": work}
    choose: Callable[[Program], object] = partial(_keep_communicators, program)
    if costs is not None:
        choose = partial(queued_messages, costs=costs, time=time, duration=duration)
    return Program.derived(columns, choose, **fields, **more)


def _keep_communicators(program: Program, with_works: Program) -> None:
    """Both have the same communicators."""
    with_works.settle(program.communicators)


_FIELDS = (
    "name", "sizes", "placement", "phases", "spans", "doc", "source_name", "layout", "layers", "plan", "tied",
    "segments", "source",
)  # fmt: skip
"""The fields of a program that works leave as they are."""


def without_works(program: Program) -> Program:
    """The program without STARTs and JOINs."""
    kept = np.flatnonzero(program.work < 0)
    columns = {name: getattr(program, name)[kept] for name in ("kind", *COLUMNS)}
    rank_start = np.searchsorted(kept, program.rank_start)
    fields = {name: getattr(program, name) for name in _FIELDS}
    return Program(rank_start=rank_start, communicators=program.communicators, **fields, **columns)


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


_PLACE_OF = np.full(len(InstructionKind), _CLOSING, np.int8)
"""[kinds] the place of an instruction inside its gap; it never descends there."""
_PLACE_OF[[InstructionKind.SEND, InstructionKind.RECV]] = _POSTED
_PLACE_OF[InstructionKind.WAIT] = _WAITED


def _merged(program: Program, events: Events) -> tuple[Int64, Int8]:
    """[events] the rows that the STARTs and JOINs get, in order, and [n] the kinds of all rows."""
    own = np.where(events.joins, np.int8(InstructionKind.JOIN), np.int8(InstructionKind.START))
    place = _OF_EVENT[events.place]
    kinds = np.empty(len(program) + own.size, np.int8)
    if loop := kernels(len(program) * _NUMPY_ROW):
        slot = np.empty(own.size, np.int64)
        loop(loops.place_events)(
            program.kind, program.rank_start, _PLACE_OF, events.gap, place, own, slot, kinds
        )  # fmt: skip
        return slot, kinds
    computes = program.kind <= InstructionKind.CELL
    gap = np.cumsum(computes) - computes + program.rank
    row = np.searchsorted(gap * _PLACES + _PLACE_OF[program.kind], events.gap * _PLACES + place)
    slot = np.asarray(row + np.arange(row.size))
    kinds[slot], kinds[_others(kinds.size, slot)] = own, program.kind
    return slot, kinds


def _others(rows: int, slot: Int64) -> Int64:
    """[rows - events] the rows that are not in ``slot``, ascending."""
    others = np.ones(rows, bool)
    others[slot] = False
    return np.flatnonzero(others)


@dataclass(frozen=True, eq=False)
class _Inserted:
    """The columns of a program with works, each made when it is read. slot: [events] rows of the events."""

    program: Program
    dependencies: Dependencies
    placed: PlacedWorks
    slot: Int64

    @cached_property
    def kept(self) -> Int64:
        """[rows of the program without works] the rows that they get."""
        return _others(len(self.program) + self.slot.size, self.slot)

    def column(self, name: str) -> npt.NDArray[Any]:
        """[n] the column of this name."""
        own = getattr(self.program, name)
        column = np.empty(self.kept.size + self.slot.size, own.dtype)
        column[self.kept] = own
        column[self.slot] = self._added(name)
        return column

    def _added(self, name: str) -> npt.NDArray[Any] | int:
        """The column of the STARTs and JOINs, [events], or what all of them have."""
        events, works, schedule = self.placed.events, self.placed.works, self.dependencies.schedule
        match name:
            case "stage" | "microbatch":
                return np.asarray(getattr(works, name)[events.work])
            case "op":
                return self._served - self.dependencies.rank_start[self.dependencies.rank[self._served]]
            case "phase" | "span":
                return np.asarray(getattr(schedule, name)[self.dependencies.first[self._served]])
        return -1

    @cached_property
    def _served(self) -> Int64:
        """[events] the next cell, in the last gap of a rank the last one."""
        gap, first = self.placed.events.gap, self.dependencies.rank_start
        rank = self.placed.rank_of(gap, self.dependencies)
        return np.asarray(np.minimum(gap - rank, first[rank + 1] - 1))
