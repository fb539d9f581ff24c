"""One run of a Program under the strictest rules a transport may have; a stall is explained by its shortest cycle.

The rules: a message completes only when both ends have reached it (gloo rendezvouses at any size), each rank's
messages complete in the order in which they were posted (one NCCL stream), a batch completes as one, and the
instruction stream stands only at WAIT and REDUCE. There are no receives from "anyone", so that the outcome does not
depend on timing: one run decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from schedc.ir.program import InstructionKind, Program
from schedc.ir.schedule import Int64

_POST, _WAIT, _REDUCE = range(3)


@dataclass(frozen=True)
class Link:
    """A rank stands at instruction ``waits``; ``holds`` is what completes only afterwards.

    blocked: it has not posted ``holds`` yet; else ``waits`` is an earlier post, first in line.
    """

    waits: int
    holds: int
    blocked: bool


@dataclass(frozen=True)
class Stall:
    """A run that does not end: number of ranks that stand for ever, and the shortest cycle of what they wait for."""

    ranks: int
    cycle: tuple[Link, ...]


def run(program: Program, send: Int64, receive: Int64) -> Stall | None:
    """Runs a program whose messages match; None if it ends. Takes about a microsecond per instruction.

    send, receive: [messages] rows of the two ends of each message.
    """
    machine = _Machine(program, send, receive)
    machine.run()
    return machine.stall()


class _Machine:
    """Units are what completes at once: a message, a batch, a reduction. Each has two ends."""

    def __init__(self, program: Program, send: Int64, receive: Int64) -> None:
        rows, unit = _units(program, send, receive)
        kind = program.kind[rows]
        action = np.where(kind == InstructionKind.WAIT, _WAIT, np.where(kind == InstructionKind.REDUCE, _REDUCE, _POST))
        posted = np.flatnonzero(action != _WAIT)
        ends, first = np.unique(unit[posted] * program.ranks + program.rank[rows[posted]], return_index=True)
        keep = action == _WAIT
        keep[posted[first]] = True  # one post per batch and rank
        bounds = np.searchsorted(rows[keep], program.rank_start).tolist()
        self.ranks = program.ranks
        self.rows, self.unit, self.action = (column[keep].tolist() for column in (rows, unit, action))
        self.at, self.stop = bounds[:-1], bounds[1:]
        self.ends: list[list[int]] = [[] for _ in range(int(unit.max(initial=-1)) + 1)]
        self.post_row: dict[tuple[int, int], int] = {}
        for end, row in zip(ends.tolist(), rows[posted[first]].tolist(), strict=True):
            which, rank = divmod(end, program.ranks)
            self.ends[which].append(rank)
            self.post_row[which, rank] = row
        self.done = bytearray(len(self.ends))
        self.reached = [0] * len(self.ends)
        self.line: list[deque[int]] = [deque() for _ in range(self.ranks)]
        self.summing = [-1] * self.ranks

    def run(self) -> None:
        runnable = list(range(self.ranks))
        while runnable:
            rank = runnable.pop()
            self._advance(rank, runnable)

    def _advance(self, rank: int, runnable: list[int]) -> None:
        at, stop, units, actions, line = self.at[rank], self.stop[rank], self.unit, self.action, self.line[rank]
        while at < stop:
            unit, action = units[at], actions[at]
            if action == _POST:
                line.append(unit)
                if len(line) == 1:
                    self._reach(unit, runnable)
            else:
                if action == _REDUCE and self.summing[rank] != unit:
                    self.summing[rank] = unit
                    self._reach(unit, runnable)
                if not self.done[unit]:
                    break
            at += 1
        self.at[rank] = at

    def _reach(self, unit: int, runnable: list[int]) -> None:
        """One end is first in its line; with the second end the unit completes and the lines move on."""
        pending = [unit]
        while pending:
            unit = pending.pop()
            self.reached[unit] += 1
            if self.reached[unit] < 2:
                continue
            self.done[unit] = 1
            for rank in self.ends[unit]:
                runnable.append(rank)
                line = self.line[rank]
                if line and line[0] == unit:
                    line.popleft()
                    if line:
                        pending.append(line[0])

    def stall(self) -> Stall | None:
        blocked = [rank for rank in range(self.ranks) if self.at[rank] < self.stop[rank]]
        if not blocked:
            return None
        pending = {self.unit[self.at[rank]] for rank in blocked}
        todo = sorted(pending)
        while todo:
            new = {follower for follower, _ in self._holds_up(todo.pop())} - pending
            pending |= new
            todo += sorted(new)
        cycles = [cycle for start in sorted(pending) if (cycle := self._shortest_cycle(start))]
        return Stall(len(blocked), min(cycles, key=len))

    def _holds_up(self, unit: int) -> list[tuple[int, Link]]:
        """What a unit that does not complete waits for, directly."""
        found = []
        for rank in self.ends[unit]:
            line, post = self.line[rank], self.post_row[unit, rank]
            if unit in line:
                if line[0] != unit:
                    found.append((line[0], Link(self.post_row[line[0], rank], post, False)))
            elif self.summing[rank] != unit:
                at = self.at[rank]
                found.append((self.unit[at], Link(self.rows[at], post, True)))
        return found

    def _shortest_cycle(self, start: int) -> tuple[Link, ...]:
        """The shortest way from a unit back to itself, breadth first; empty if there is none."""
        trails: dict[int, tuple[Link, ...]] = {start: ()}
        todo = deque([start])
        while todo:
            unit = todo.popleft()
            for follower, link in self._holds_up(unit):
                if follower == start:
                    return (*trails[unit], link)
                if follower not in trails:
                    trails[follower] = (*trails[unit], link)
                    todo.append(follower)
        return ()


def _units(program: Program, send: Int64, receive: Int64) -> tuple[Int64, Int64]:
    """Rows of SEND, RECV, WAIT and REDUCE, ascending, and the unit of each."""
    message, batch = program.message.astype(np.int64), program.batch[send]
    unit_of = np.arange(send.size)
    in_batch = np.flatnonzero(batch >= 0)
    _, first, which = np.unique(batch[in_batch], return_index=True, return_inverse=True)
    unit_of[in_batch] = in_batch[first][which]
    rows = np.flatnonzero(program.kind >= InstructionKind.SEND)
    sums = program.kind[rows] == InstructionKind.REDUCE
    unit = np.empty(rows.size, np.int64)
    unit[~sums] = unit_of[np.searchsorted(message[send], message[rows[~sums]])]
    here, there = program.rank[rows[sums]].astype(np.int64), program.peer[rows[sums]]
    pair = np.minimum(here, there) * program.ranks + np.maximum(here, there)
    _, number = np.unique(pair * 2**31 + message[rows[sums]], return_inverse=True)
    unit[sums] = send.size + number
    return rows, unit
