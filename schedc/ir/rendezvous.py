"""Ranks that start items together and block until they complete: whether all finish, else the shortest cycle.

An item is what several ranks take part in: a message, a batch of messages, a reduction, a collective. The rules are the
strictest that a transport may have:

* An item completes only when it is the head of its queue on every rank that takes part (gloo rendezvouses at any size).
* The items of a queue complete on a rank in the order of their starts. A queue is an NCCL stream: one for each
  communicator, if the program says, else one for all. A batch is one item in each queue.
* A rank blocks only where its stream waits for an item, or meets others in one.

No rank receives from "anyone", so the outcome does not depend on timing: one run decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Int32, Int64, repeat
from schedc.ir.program import InstructionKind, Program


class QueueAction(IntEnum):
    """What a rank does with an item."""

    START = 0
    """Append it to its queue on the rank; never blocks. Of several starts of an item on a rank the first counts."""
    WAIT = 1
    """Block until it is complete."""
    MEET = 2
    """Take part past the queue, and block until it is complete: a reduction behind all messages."""


_START, _MEET = int(QueueAction.START), int(QueueAction.MEET)


class QueueStep(NamedTuple):
    """One step of a rank's stream."""

    action: QueueAction
    item: Hashable


@dataclass(frozen=True, eq=False)
class Streams:
    """The steps of all ranks as columns; rank r owns positions rank_start[r] ..< rank_start[r + 1].

    action: [steps] `QueueAction`. item: [steps] number of the item, from 0. queue: number of the queue of an item, 0
    where it says nothing.
    """

    action: Int64
    item: Int64
    rank_start: Int64
    queue: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, streams: Sequence[Iterable[QueueStep]]) -> Streams:
        """The columns of a list of steps per rank."""
        numbers: dict[Hashable, int] = {}
        rows = [[(step.action, numbers.setdefault(step.item, len(numbers))) for step in stream] for stream in streams]
        columns = np.array([row for stream in rows for row in stream], np.int64).reshape(-1, 2)
        return cls(columns[:, 0], columns[:, 1], np.cumsum([0, *map(len, rows)]))


class Link(NamedTuple):
    """A rank blocks at position ``waits``; ``holds`` is its start of an item that completes only afterwards.

    blocked: the rank has not reached ``holds`` yet; else ``waits`` is an earlier start, the head of its queue.
    """

    waits: int
    holds: int
    blocked: bool


class Stuck(NamedTuple):
    """A run that does not end.

    positions: [stuck ranks] where they block, ascending. cycle: the shortest cycle of waits.
    """

    positions: tuple[int, ...]
    cycle: tuple[Link, ...]


def find_stuck(streams: Streams) -> Stuck | None:
    """Simulates the ranks; None if all reach the ends of their streams. Takes about a microsecond per step."""
    simulation = _Simulation(streams)
    simulation.run()
    return simulation.stuck()


def find_stuck_instructions(program: Program, send: Int64) -> Stuck | None:
    """`find_stuck` for a program whose messages match, each in the queue of its communicator; positions are rows.

    send: [messages] row of the SEND of each message, by its number.
    """
    communicator = program.communicators if program.communicators.size else np.zeros(send.size, np.int32)
    rows, items = _items(program, send, communicator)
    kind = program.kind[rows]
    action = np.full(rows.size, int(QueueAction.START))
    action[kind == InstructionKind.WAIT] = QueueAction.WAIT
    action[kind == InstructionKind.REDUCE] = QueueAction.MEET
    queue = dict(enumerate(communicator.tolist())) if communicator.any() else {}
    stuck = find_stuck(Streams(action, items, np.searchsorted(rows, program.rank_start), queue))
    if stuck is None:
        return None
    row = rows.tolist()
    cycle = tuple(Link(row[link.waits], row[link.holds], link.blocked) for link in stuck.cycle)
    return Stuck(tuple(row[position] for position in stuck.positions), cycle)


def runs_in_one_queue(program: Program) -> bool:
    """Whether a program whose messages match also runs with all its messages on one communicator."""
    sends, receives = (
        rows[np.argsort(program.message[rows], kind="stable")]
        for rows in (np.flatnonzero(program.kind == kind) for kind in (InstructionKind.SEND, InstructionKind.RECV))
    )
    between = program.peer[sends], program.rank[sends]
    if (np.lexsort((sends, *between)) != np.lexsort((receives, *between))).any():
        return False
    return find_stuck_instructions(replace(program, communicators=program.communicators[:0]), sends) is None


class _Simulation:
    """The run. ``queues``: of each queue per rank, the items that were started and are not complete, in order."""

    def __init__(self, streams: Streams) -> None:
        self.ranks = len(streams.rank_start) - 1
        rank = repeat(np.arange(self.ranks), np.diff(streams.rank_start))
        starts = np.flatnonzero(streams.action != QueueAction.WAIT)
        members, first = np.unique(streams.item[starts] * self.ranks + rank[starts], return_index=True)
        keep = streams.action == QueueAction.WAIT
        keep[starts[first]] = True  # one start per item and rank
        bounds = np.searchsorted(np.flatnonzero(keep), streams.rank_start).tolist()
        self.positions: list[int] = np.flatnonzero(keep).tolist()
        self.item, self.action = streams.item[keep].tolist(), streams.action[keep].tolist()
        self.here, self.stop = bounds[:-1], bounds[1:]
        self.members: list[list[int]] = [[] for _ in range(int(streams.item.max(initial=-1)) + 1)]
        self.start_of: dict[tuple[int, int], int] = {}
        for member, position in zip(members.tolist(), starts[first].tolist(), strict=True):
            item, of_rank = divmod(member, self.ranks)
            self.members[item].append(of_rank)
            self.start_of[item, of_rank] = position
        self.missing = [len(ranks) for ranks in self.members]
        self.done = bytearray(len(self.members))
        numbers = [streams.queue.get(item, 0) for item in range(len(self.members))]
        queues: list[list[deque[int]]] = [
            [deque() for _ in range(self.ranks)] for _ in range(max(numbers, default=0) + 1)
        ]
        self.queues = [queues[number] for number in numbers]
        """[items][P] the queue of each item on each rank."""
        self.meeting = [-1] * self.ranks

    def run(self) -> None:
        runnable = list(range(self.ranks))
        while runnable:
            self._advance(runnable.pop(), runnable)

    def _advance(self, rank: int, runnable: list[int]) -> None:
        here, stop, items, actions = self.here[rank], self.stop[rank], self.item, self.action
        while here < stop:
            item, action = items[here], actions[here]
            if action == _START:
                queue = self.queues[item][rank]
                queue.append(item)
                if len(queue) == 1:
                    self._arrive(item, runnable)
            else:
                if action == _MEET and self.meeting[rank] != item:
                    self.meeting[rank] = item
                    self._arrive(item, runnable)
                if not self.done[item]:
                    break
            here += 1
        self.here[rank] = here

    def _arrive(self, item: int, runnable: list[int]) -> None:
        """The item is the head on one more rank; with the last rank it completes, and the queues move on."""
        pending = [item]
        while pending:
            item = pending.pop()
            self.missing[item] -= 1
            if self.missing[item]:
                continue
            self.done[item] = 1
            for rank in self.members[item]:
                runnable.append(rank)
                queue = self.queues[item][rank]
                if queue and queue[0] == item:
                    queue.popleft()
                    if queue:
                        pending.append(queue[0])

    def stuck(self) -> Stuck | None:
        blocked = [rank for rank in range(self.ranks) if self.here[rank] < self.stop[rank]]
        if not blocked:
            return None
        pending = {self.item[self.here[rank]] for rank in blocked}
        todo = sorted(pending)
        while todo:
            new = {follower for follower, _ in self._holds_up(todo.pop())} - pending
            pending |= new
            todo += sorted(new)
        cycles = [cycle for start in sorted(pending) if (cycle := self._shortest_cycle(start))]
        positions = tuple(self.positions[self.here[rank]] for rank in blocked)
        return Stuck(positions, min(cycles, key=len, default=()))

    def _holds_up(self, item: int) -> list[tuple[int, Link]]:
        """The items that an incomplete item waits for directly, each with the rank's link."""
        links = []
        for rank in self.members[item]:
            queue, start = self.queues[item][rank], self.start_of[item, rank]
            if item in queue:
                if queue[0] != item:
                    links.append((queue[0], Link(self.start_of[queue[0], rank], start, False)))
            elif self.meeting[rank] != item:
                here = self.here[rank]
                links.append((self.item[here], Link(self.positions[here], start, True)))
        return links

    def _shortest_cycle(self, start: int) -> tuple[Link, ...]:
        """The shortest way from an item back to itself, breadth first; empty if there is none."""
        trails: dict[int, tuple[Link, ...]] = {start: ()}
        todo = deque([start])
        while todo:
            item = todo.popleft()
            for follower, link in self._holds_up(item):
                if follower == start:
                    return (*trails[item], link)
                if follower not in trails:
                    trails[follower] = (*trails[item], link)
                    todo.append(follower)
        return ()


def _items(program: Program, send: Int64, communicator: Int32) -> tuple[Int64, Int64]:
    """Rows of SEND, RECV, WAIT and REDUCE, ascending, and the item of each: a message, a batch or a reduction.

    communicator: [messages]. The messages of a batch on different communicators are different items.
    """
    message, batch = program.message.astype(np.int64), program.batch[send].astype(np.int64)
    item_of = np.arange(send.size)
    in_batch = np.flatnonzero(batch >= 0)
    queued = batch[in_batch] * (int(communicator.max(initial=0)) + 1) + communicator[in_batch]
    _, first, which = np.unique(queued, return_index=True, return_inverse=True)
    item_of[in_batch] = in_batch[first][which]
    rows = np.flatnonzero((program.kind >= InstructionKind.SEND) & (program.kind <= InstructionKind.REDUCE))
    sums = program.kind[rows] == InstructionKind.REDUCE
    item = np.empty(rows.size, np.int64)
    item[~sums] = item_of[np.searchsorted(message[send], message[rows[~sums]])]
    here, there = program.rank[rows[sums]].astype(np.int64), program.peer[rows[sums]]
    pair = np.minimum(here, there) * program.ranks + np.maximum(here, there)
    _, number = np.unique(pair * 2**31 + message[rows[sums]], return_inverse=True)
    item[sums] = send.size + number
    return rows, item
