"""Deterministic list scheduling: runs a schedule under given costs, ranks choosing among the ops that are ready.

What a rank does next depends on when the others finish, so that this goes op by op, unlike the rest of elaboration;
only computed orders pay for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from schedc.cost.costs import Costs
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.source import Span

MAX_DISPATCHED = 1_000_000
"""Ops of a schedule with a computed order: some seconds."""


@dataclass(frozen=True)
class Mark:
    """Ops of a kind: of any chunk, or of one chunk of each rank."""

    kind: OpKind
    chunk: tuple[int, ...] | None


@dataclass(frozen=True)
class Limit:
    """A counted op runs only where at most ``most`` (by rank) more of them than of the freed ones have then run."""

    counted: Mark
    freed: Mark | None
    most: tuple[int, ...]


@dataclass(frozen=True)
class InTurn:
    """`fill W within most`: ops run in their turn; where the next one must wait, the oldest pending W does, and if
    there is none the op behind the next one.

    A forward runs only where at most ``most`` activations are then held (F less W); out of turn it also leaves room
    for the forward that it overtakes, W put aside (F less I).
    """

    span: Span
    most: tuple[int, ...] | None


@dataclass(frozen=True)
class Preferred:
    """`prefer ... cap ...`: of the ops that are ready and within every limit the most preferred, and of those the first
    in the text. Ops that no wish names come last. A rank never waits while one is ready.

    wishes: one mark, or two: a forward and a backward that are both ready run as a pair.
    An op that overtakes counted ones of the text leaves room for them, so that a text that keeps within the limits
    is one way to run what is left, and the ranks never stand still.
    fill: a W comes after all others, and only where none of them is on its way to arrive before the W would end: the
    gaps that are filled in the zero-bubble paper's heuristic (arXiv 2401.10241, section 3.1) are at least as long.
    """

    span: Span
    wishes: tuple[tuple[Mark, ...], ...]
    limits: tuple[Limit, ...]
    fill: bool = False


Rule = InTurn | Preferred
Cell = tuple[int, ...]
"""The row of an op, or the two rows of a pair."""


@dataclass(frozen=True)
class Ran:
    """The cells of each rank as they ran, the time, and whether all of them could run."""

    cells: list[list[Cell]]
    makespan: float
    complete: bool


def dispatch(schedule: Schedule, computed: Sequence[bool], rule: Rule | None, costs: Costs) -> Ran:
    """Run a schedule whose ``computed`` rows ([ops]) go by ``rule`` and whose others run as written.

    The computed rows of a rank are consecutive. Times are those of ``costs``; a `timed` block has unit slots.
    """
    machine = _Machine(schedule, Costs() if isinstance(rule, InTurn) else costs)
    ranks = [_Rank(machine, rank, computed, rule) for rank in range(schedule.ranks)]
    free = [0.0] * schedule.ranks
    cells: list[list[Cell]] = [[] for _ in ranks]
    events = [(0.0, rank) for rank in range(schedule.ranks)]
    heapify(events)
    while events:
        now, rank = heappop(events)
        cell = ranks[rank].next(now) if free[rank] <= now else None
        if cell is None:
            continue  # the rank is woken again when it is free, and when something arrives
        cells[rank].append(cell)
        free[rank] = machine.start(cell, rank, now)
        heappush(events, (free[rank], rank))
        for wake in machine.sent:
            heappush(events, wake)
    return Ran(cells, max(free, default=0.0), sum(map(len, (c for r in cells for c in r))) == len(schedule))


def reordered(schedule: Schedule, ran: Ran) -> Schedule:
    """The schedule in the order in which it ran."""
    cells = [cell for rank in ran.cells for cell in rank]
    rows = np.array([row for cell in cells for row in cell], np.int64)
    numbers = [number if len(cell) > 1 else -1 for number, cell in enumerate(cells) for _ in cell]
    pair = np.array(numbers, np.int32)
    pair[pair >= 0] = np.unique(pair[pair >= 0], return_inverse=True)[1]
    columns = {name: getattr(schedule, name)[rows] for name in ("kind", "stage", "microbatch", "phase", "span")}
    return replace(schedule, pair=pair, **columns)


class _Machine:
    """What has arrived where, and how long things take."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.kind: list[int] = schedule.kind.tolist()
        self.stage: list[int] = schedule.stage.tolist()
        self.microbatch: list[int] = schedule.microbatch.tolist()
        self.costs = costs.resolved(schedule.stages)
        self.time: list[list[float]] = [getattr(self.costs, kind.name).tolist() for kind in OpKind]
        self.last, self.count = schedule.stages - 1, schedule.microbatches
        pipe = schedule.placement.pipe_of_microbatch(np.arange(self.count, dtype=np.int32)).tolist()
        self.holder = [schedule.placement.rank_of_stage.tolist()[p] for p in pipe]
        # of every stage and microbatch: when its output reaches the stage after, its gradient the stage before
        self.forward = [inf] * (schedule.stages * self.count)
        self.backward = [inf] * (schedule.stages * self.count)
        self.split = [False] * (schedule.stages * self.count)
        self.sent: list[tuple[float, int]] = []

    def ready(self, row: int, now: float) -> bool:
        """Whether all that an op needs is there."""
        return self.arrival(row) <= now

    def arrival(self, row: int) -> float:
        """When all that an op needs is there, as far as it is known: inf where some of it has not been started."""
        kind, stage = self.kind[row], self.stage[row]
        at = stage * self.count + self.microbatch[row]
        if kind == OpKind.F:
            return 0.0 if stage == 0 else self.forward[at - self.count]
        if kind == OpKind.W:
            return 0.0 if self.split[at] else inf
        if self.forward[at] == inf:
            return inf
        return 0.0 if stage == self.last else self.backward[at + self.count]

    def start(self, cell: Cell, rank: int, now: float) -> float:
        """Note what a cell gives to others, in ``sent`` whom it wakes, and return when it ends."""
        kinds, stages = [self.kind[row] for row in cell], [self.stage[row] for row in cell]
        time: float = self.time[kinds[0]][stages[0]]
        if len(cell) == 2:
            time = float(self.costs.pair(stages[0], stages[1], kinds[1] == OpKind.B))
        end = now + time
        self.sent = []
        for row, kind, stage in zip(cell, kinds, stages, strict=True):
            at = stage * self.count + self.microbatch[row]
            self.split[at] |= kind == OpKind.I
            if kind == OpKind.W:
                continue
            table, taker = (self.forward, stage + 1) if kind == OpKind.F else (self.backward, stage - 1)
            to = self.holder[self.microbatch[row]][taker] if 0 <= taker <= self.last else rank
            table[at] = end + self.costs.p2p * (to != rank)
            if to != rank:
                self.sent.append((table[at], to))
        return end


class _Rank:
    """What a rank has still to do: cells before the computed order, that, and cells after it."""

    def __init__(self, machine: _Machine, rank: int, computed: Sequence[bool], rule: Rule | None) -> None:
        self.machine = machine
        start, stop = machine.schedule.rank_start[rank : rank + 2].tolist()
        pool = [row for row in range(start, stop) if computed[row]] if rule is not None else []
        edge = pool[0] if pool else stop
        self.before = deque(_cells(machine.schedule, start, edge))
        self.after = deque(_cells(machine.schedule, edge + len(pool), stop))
        self.pool: _Pool | None = None
        if isinstance(rule, InTurn):
            self.pool = _TurnPool(machine, rank, pool, rule)
        if isinstance(rule, Preferred):
            self.pool = _WishPool(machine, rank, pool, rule)

    def next(self, now: float) -> Cell | None:
        """The cell that the rank starts now; None if it has to wait."""
        if not self.before and self.pool is not None and self.pool.left:
            cell = self.pool.choose(now)
        else:
            cells = self.before or self.after
            ready = cells and all(self.machine.ready(row, now) for row in cells[0])
            cell = cells.popleft() if ready else None
        if cell is not None and self.pool is not None:
            self.pool.note(cell)
        return cell


def _cells(schedule: Schedule, start: int, stop: int) -> Iterator[Cell]:
    """The cells of consecutive rows of one rank."""
    pair = schedule.pair[start:stop].tolist()
    row = start
    while row < stop:
        size = 1 + (row + 1 < stop and pair[row - start] >= 0 and pair[row - start] == pair[row - start + 1])
        yield tuple(range(row, row + size))
        row += size


@dataclass
class _Pool:
    """The rows of a computed order that have not run. ``left`` counts them."""

    machine: _Machine
    rank: int
    rows: list[int]

    def __post_init__(self) -> None:
        self.left = len(self.rows)

    def choose(self, now: float) -> Cell | None:
        raise NotImplementedError

    def note(self, cell: Cell) -> None:
        raise NotImplementedError


@dataclass
class _TurnPool(_Pool):
    """`InTurn` on one rank."""

    rule: InTurn
    held: int = 0
    flying: int = 0
    weights: deque[int] = field(default_factory=deque)
    """Rows of the pending weight gradients, oldest first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        machine = self.machine
        self.turns = deque(row for row in self.rows if machine.kind[row] != OpKind.W)
        self.weight_of = {
            (machine.stage[row], machine.microbatch[row]): row for row in self.rows if machine.kind[row] == OpKind.W
        }
        self.most = inf if self.rule.most is None else self.rule.most[self.rank]

    def choose(self, now: float) -> Cell | None:
        turns = self.turns
        if turns and self._runs(turns[0], now):
            return self._taken(turns.popleft())
        if self.weights:
            return self._taken(self.weights.popleft())
        if len(turns) > 1 and self._overtakes(turns[0], turns[1], now):
            first, second = turns.popleft(), turns.popleft()
            turns.appendleft(first)
            return self._taken(second)
        return None

    def _taken(self, row: int) -> Cell:
        self.left -= 1
        return (row,)

    def _runs(self, row: int, now: float) -> bool:
        room = self.machine.kind[row] != OpKind.F or self.held < self.most
        return room and self.machine.ready(row, now)

    def _overtakes(self, first: int, second: int, now: float) -> bool:
        kind, stage = self.machine.kind, self.machine.stage
        if (kind[first], stage[first]) == (kind[second], stage[second]):
            return False
        room = kind[second] != OpKind.F or self.flying + (kind[first] == OpKind.F) < self.most
        return room and self._runs(second, now)

    def note(self, cell: Cell) -> None:
        for row in cell:
            kind = self.machine.kind[row]
            self.held += (kind == OpKind.F) - (kind in (OpKind.W, OpKind.B))
            self.flying += (kind == OpKind.F) - (kind in (OpKind.I, OpKind.B))
            if kind == OpKind.I:
                self.weights.append(self.weight_of[self.machine.stage[row], self.machine.microbatch[row]])


_Key = tuple[int, int]
"""Kind and stage: ops with the same key run in the order of the text."""


@dataclass
class _WishPool(_Pool):
    """`Preferred` on one rank."""

    rule: Preferred

    def __post_init__(self) -> None:
        super().__post_init__()
        self.queues: dict[_Key, list[int]] = {}
        for row in self.rows:
            self.queues.setdefault((self.machine.kind[row], self.machine.stage[row]), []).append(row)
        self.head = dict.fromkeys(self.queues, 0)
        self.wishes = [[self._keys(mark) for mark in wish] for wish in self.rule.wishes]
        fillers = [key for key in self.queues if self.rule.fill and key[0] == OpKind.W]
        self.wishes.append([[key for key in self.queues if key not in fillers]])
        self.fillers = fillers
        self.limits = [
            (set(self._keys(limit.counted)), set(self._keys(limit.freed)), limit.most[self.rank])
            for limit in self.rule.limits
        ]
        self.count = [0] * len(self.limits)

    def _keys(self, mark: Mark | None) -> list[_Key]:
        if mark is None:
            return []
        stages = self.machine.schedule.placement.stage_of_chunk[self.rank].tolist()
        chosen = stages if mark.chunk is None else [stages[mark.chunk[self.rank]]]
        keys = [(int(mark.kind), stage) for stage in chosen if stage >= 0]
        return [key for key in keys if key in self.queues]

    def choose(self, now: float) -> Cell | None:
        for wish in self.wishes:
            rows = [self._first(keys, now) for keys in wish]
            cell = tuple(row for row in rows if row is not None)
            if len(cell) == len(wish):
                return self._taken(cell)
        filler = self._first(self.fillers, now)
        if filler is None or self._soonest() < now + self.machine.time[OpKind.W][self.machine.stage[filler]]:
            return None
        return self._taken((filler,))

    def _taken(self, cell: Cell) -> Cell:
        for row in cell:
            self.head[self.machine.kind[row], self.machine.stage[row]] += 1
        self.left -= len(cell)
        return cell

    def _soonest(self) -> float:
        """When the first of the ops that no W may delay arrives, of those that are on their way."""
        heads = self._heads([key for key in self.queues if key not in self.fillers])
        return min((self.machine.arrival(row) for row in heads if self._within(row)), default=inf)

    def _heads(self, keys: list[_Key]) -> list[int]:
        """The next op with each of these keys."""
        return [queue[self.head[key]] for key in keys if self.head[key] < len(queue := self.queues[key])]

    def _first(self, keys: list[_Key], now: float) -> int | None:
        """Of the ops with these keys that may run, the first in the text."""
        for row in sorted(self._heads(keys)):
            if self.machine.ready(row, now) and self._within(row):
                return row
        return None

    def _within(self, row: int) -> bool:
        key = self.machine.kind[row], self.machine.stage[row]
        return all(
            count + self._overtaken(row, counted) < most
            for count, (counted, _, most) in zip(self.count, self.limits, strict=True)
            if key in counted
        )

    def _overtaken(self, row: int, keys: set[_Key]) -> int:
        """How many ops with these keys the text has before ``row`` that have not run."""
        return sum(
            bisect_left(queue, row, self.head[key]) - self.head[key]
            for key, queue in self.queues.items()
            if key in keys
        )

    def note(self, cell: Cell) -> None:
        for row in cell:
            key = self.machine.kind[row], self.machine.stage[row]
            for i, (counted, freed, _) in enumerate(self.limits):
                self.count[i] += (key in counted) - (key in freed)
