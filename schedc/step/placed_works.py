"""Works with their places between the cells of a schedule, and the memory that they keep off the device.

A gap is the place in front of a cell, or behind the last cell of a rank. Rank r with n cells has n + 1 gaps. The gap
in front of a cell has the cell's number plus its rank. Posts of messages come first in a gap. Then come STARTs and
JOINs of what leaves, DROPs, and STARTs of what comes. Waits for messages, JOINs of what comes, and the cell are last.
In the last gap of a rank the REDUCEs stand in place of the cell, and the stream's last works behind (`WorkPlace`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.ir.arrays import Bools, Floats, Int8, Int32, Int64, bincount, repeat
from schedc.ir.works import DTYPES, FACTS, NO_WORKS, WorkGroup, WorkKind, WorkLane, Works
from schedc.step.dependencies import Dependencies, reduce_by_rank

_LANES = np.array([FACTS[kind].lane for kind in WorkKind])
_ON_DEVICE, _ON_HOST = (
    np.array([[getattr(FACTS[kind], f"{half}{where}") for kind in WorkKind] for half in ("at_start", "at_join")], float)
    for where in ("", "_on_host")
)
"""[2, kinds] how many times the bytes of a work device and host hold more from its START on, and from its JOIN on."""
_ACTIVATIONS = np.array([WorkKind.OFFLOAD, WorkKind.FETCH])


class WorkPlace(IntEnum):
    """The places of STARTs and JOINs inside a gap, in their order."""

    LEAVE = 0
    """START of what leaves, and of gradient sums."""
    LEFT = 1
    """JOIN of these."""
    DROP = 2
    """START of a DROP."""
    DROPPED = 3
    """JOIN of a DROP."""
    COME = 4
    """START of what comes, and of second halves of sums. Waits for messages stand behind it."""
    CAME = 5
    """JOIN of what comes. The cell or the REDUCEs stand behind it."""
    SUM = 6
    """START of sums that wait for the REDUCEs. This place and all places below lie in the last gap."""
    SUMMED = 7
    """JOIN of first halves of sums."""
    SPREAD = 8
    """START of second halves."""
    CLOSE = 9
    """JOIN of what ends with the stream."""


_PLACES: dict[WorkKind, tuple[WorkPlace, WorkPlace]] = {
    WorkKind.OFFLOAD: (WorkPlace.LEAVE, WorkPlace.LEFT),
    WorkKind.FETCH: (WorkPlace.COME, WorkPlace.CAME),
    WorkKind.GATHER: (WorkPlace.COME, WorkPlace.CAME),
    WorkKind.DROP: (WorkPlace.DROP, WorkPlace.DROPPED),
    WorkKind.SCATTER: (WorkPlace.LEAVE, WorkPlace.LEFT),
    WorkKind.SPREAD: (WorkPlace.COME, WorkPlace.CLOSE),
    WorkKind.SNAPSHOT: (WorkPlace.LEAVE, WorkPlace.CLOSE),
}
"""Places of START and JOIN of each kind inside their gaps, but for what stands behind REDUCEs."""
DEFAULT_PLACES = np.array([_PLACES[kind] for kind in WorkKind], np.int8).T
"""[2, kinds] the same as an array."""


@dataclass(frozen=True, eq=False)
class PlacedWorks:
    """Works in the order of their STARTs, rank by rank.

    start, join: [works] the gaps of their STARTs and JOINs. start_place, join_place: [works] `WorkPlace` in the gap.
    in_part: stages of whose activations only a part moves; these count as present.
    """

    works: Works
    start: Int64
    join: Int64
    start_place: Int8
    join_place: Int8
    in_part: frozenset[int] = field(default=frozenset(), kw_only=True)

    @classmethod
    def of(
        cls,
        kind: Int8,
        stage: Int32,
        microbatch: Int32,
        bytes: Floats,
        start: Int32 | Int64,
        join: Int32 | Int64,
        group: Int8 | None = None,
        places: tuple[Int8, Int8] | None = None,
    ) -> PlacedWorks:
        """The works in the order of their STARTs. Inside a gap what leaves comes first, in the order of the JOINs.

        All [works]; start, join: gaps; bytes: memory that moves. group: `WorkGroup`, by default all are local. places:
        those of START and JOIN inside their gaps, by default those of the kinds.
        """
        group = np.full(kind.size, WorkGroup.LOCAL, np.int8) if group is None else group
        columns: tuple[Any, ...] = (kind, _LANES[kind], stage, microbatch, bytes, group)
        works = Works(*(column.astype(dtype) for column, dtype in zip(columns, DTYPES.values(), strict=True)))
        gaps = start.astype(np.int64), join.astype(np.int64)
        return cls(works, *gaps, *(DEFAULT_PLACES[:, kind] if places is None else places)).in_order()

    def in_order(self) -> PlacedWorks:
        """The same works in the order of their STARTs."""
        works = self.works
        inside = (works.group, works.microbatch, works.stage, self.join, works.kind)
        return self.only(order_of((*inside, self.start_place, self.start)))

    def only(self, which: Bools | Int64) -> PlacedWorks:
        """These works alone."""
        places = self.start_place[which], self.join_place[which]
        columns = self.start[which], self.join[which], *places
        return PlacedWorks(self.works.only(which), *columns, in_part=self.in_part)

    def beside(self, other: PlacedWorks) -> PlacedWorks:
        """The works of both, in order."""
        pairs = [(getattr(self, name), getattr(other, name)) for name in ("start", "join", "start_place", "join_place")]
        works = {name: np.concatenate([getattr(self.works, name), getattr(other.works, name)]) for name in DTYPES}
        columns = (np.concatenate(pair) for pair in pairs)
        return PlacedWorks(Works(**works), *columns, in_part=self.in_part | other.in_part).in_order()

    @classmethod
    def none(cls) -> PlacedWorks:
        """No works."""
        return cls(NO_WORKS, *np.zeros((2, 0), np.int64), *np.zeros((2, 0), np.int8))

    def __len__(self) -> int:
        return len(self.works)

    def of_kinds(self, *kinds: WorkKind) -> PlacedWorks:
        """Those of these kinds alone."""
        return self.only(np.isin(self.works.kind, kinds))

    @property
    def of_activations(self) -> PlacedWorks:
        """Offloads and fetches alone."""
        return self if self.moves_activations_alone else self.only(np.isin(self.works.kind, _ACTIVATIONS))

    @cached_property
    def moves_activations_alone(self) -> bool:
        """Whether all are offloads and fetches."""
        return bool((self.works.kind <= WorkKind.FETCH).all())

    def counted(self) -> PlacedWorks:
        """The same works, counted: 1 for a whole activation, 0 for a part."""
        whole = ~np.isin(self.works.stage, list(self.in_part))
        return replace(self, works=replace(self.works, bytes=whole.astype(np.float64)))

    def rank_of(self, gaps: Int64, dependencies: Dependencies) -> Int64:
        """[gaps] the rank of each gap."""
        first = dependencies.rank_start[:-1] + np.arange(dependencies.rank_start.size - 1)
        return np.searchsorted(first, gaps, side="right") - 1

    def away(self, dependencies: Dependencies) -> Floats:
        """[cells] memory that is not on the device while each cell runs: offloaded memory less returned memory.

        The unit is that of the works' bytes. It follows from the order alone. An activation counts as present until
        the JOIN of its offload, and from the START of its fetch on. Whole parameters and buckets of gradients are less
        than 0 away.
        """
        total = self._running(_ON_DEVICE)
        ends = np.searchsorted(self.events.gap, np.arange(len(dependencies)) + dependencies.rank, side="right")
        return np.asarray(self._before(total, dependencies)[dependencies.rank] - total[ends])

    def on_host(self, dependencies: Dependencies) -> Floats:
        """[gaps] the most memory on the host in each gap: an activation from the START of its offload on.

        It is there until the JOIN of its fetch, which stands behind the STARTs of its gap.
        """
        return self._most_in_gaps(_ON_HOST, dependencies)

    def most_between(self, dependencies: Dependencies, after: Floats | Int64) -> Floats:
        """[cells] the most that a rank holds from the end of each cell to the start of the next.

        after: [cells] memory behind each cell, without works; in the unit of the works' bytes, as the result.
        """
        behind = np.arange(len(dependencies)) + dependencies.rank + 1
        return np.asarray(after + self._most_in_gaps(_ON_DEVICE, dependencies)[behind])

    def peaks_between(self, dependencies: Dependencies, after: Floats) -> Floats:
        """[P] the most that each rank holds between its cells, and in front of the first one; ``after`` as above."""
        first = dependencies.rank_start[:-1] + np.arange(dependencies.rank_start.size - 1)
        held = reduce_by_rank(np.maximum, self.most_between(dependencies, after), dependencies.rank_start)
        return np.asarray(np.maximum(held, self._most_in_gaps(_ON_DEVICE, dependencies)[first]))

    def _most_in_gaps(self, steps: Floats, dependencies: Dependencies) -> Floats:
        """[gaps] the most of a running count in each gap, what it begins with included; steps: as for `_running`."""
        total, ranks = self._running(steps), dependencies.rank_start.size - 1
        most = total[np.searchsorted(self.events.gap, np.arange(len(dependencies) + ranks))]
        np.maximum.at(most, self.events.gap, total[1:])
        return np.asarray(most - repeat(self._before(total, dependencies), np.diff(dependencies.rank_start) + 1))

    def _running(self, steps: Floats) -> Floats:
        """[events + 1] a count in front of the events and behind each. steps: [2, kinds] what STARTs and JOINs add."""
        works, events = self.works, self.events
        kind = works.kind[events.work]
        return np.concatenate([[0.0], np.cumsum(steps[events.joins.astype(np.int8), kind] * works.bytes[events.work])])

    def _before(self, total: Floats, dependencies: Dependencies) -> Floats:
        """[P] the count of `_running` in front of each rank's events."""
        first = dependencies.rank_start[:-1] + np.arange(dependencies.rank_start.size - 1)
        return np.asarray(total[np.searchsorted(self.events.gap, first)])

    @cached_property
    def events(self) -> Events:
        """The STARTs and JOINs in the order in which each rank meets them."""
        works = np.arange(len(self))
        gap = np.concatenate([self.start, self.join])
        work = np.concatenate([works, works])
        joins = np.arange(gap.size) >= len(self)
        place = np.concatenate([self.start_place, self.join_place])
        order = np.argsort(gap * len(WorkPlace) + place, kind="stable")
        return Events(gap[order], work[order], place[order], joins[order])


def order_of(columns: Sequence[npt.NDArray[Any]]) -> Int64:
    """[n] the order of the rows by the last column, then by the one before it: as `numpy.lexsort` gives, in one sort.

    columns: whole numbers. Columns of more than 62 bits together are sorted one by one.
    """
    key, room = np.zeros(columns[0].size, np.int64), 1
    for column in columns if key.size else ():
        least = int(column.min())
        width = int(column.max()) - least + 1
        if room * width >= 1 << 62:
            return np.lexsort(tuple(columns))
        key += (column - np.int64(least)) * room
        room *= width
    return np.argsort(key, kind="stable")


@dataclass(frozen=True, eq=False)
class Events:
    """STARTs and JOINs in order. gap, work: [events]; place: [events] `WorkPlace`; joins: [events] whether a JOIN."""

    gap: Int64
    work: Int64
    place: Int8
    joins: Bools


@dataclass(frozen=True, eq=False)
class TimedWorks:
    """Works with their places and the times of their lanes. time: [works] on the lane, in the unit of the cells."""

    placed: PlacedWorks
    time: Floats


@dataclass(frozen=True, eq=False)
class LaneTimes:
    """When cells and works run.

    start, end: [cells]; begin, finish: [works] on their lanes; exposed: [works] time that the rank stood at the JOIN;
    closed: [P] when each rank has joined the works behind its last cell.
    """

    start: Floats
    end: Floats
    begin: Floats
    finish: Floats
    exposed: Floats
    closed: Floats

    def per_rank(self, placed: PlacedWorks, dependencies: Dependencies, values: Floats) -> Floats:
        """[P, lanes] ``values`` [works] summed by rank and lane."""
        ranks = dependencies.rank_start.size - 1
        rank = placed.rank_of(placed.start, dependencies)
        sums = bincount(rank * len(WorkLane) + placed.works.lane, weights=values, minlength=ranks * len(WorkLane))
        return np.asarray(sums.reshape(ranks, len(WorkLane)))
