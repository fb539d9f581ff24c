"""Ranks that meet: each starts things in its order and stands for some of them; who stands for ever, if anyone does.

The strictest rules that a transport may have: what a rank has started goes on one at a time, in the order of its
starts, whatever it is; a thing is complete when it is the turn of all ranks that take part in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Act(NamedTuple):
    """A rank starts ``thing``, or stands until it is complete."""

    start: bool
    thing: Hashable


def stand_for_ever(streams: Sequence[Sequence[Act]]) -> list[tuple[int, int]]:
    """(rank, place in its stream) of those that never come to their ends; in a thing take part all that start it."""
    return _Meeting(streams).run()


class _Meeting:
    """``line``: what each rank has started and is not complete. ``turns``: on how many ranks it is a thing's turn."""

    def __init__(self, streams: Sequence[Sequence[Act]]) -> None:
        self.streams = streams
        self.at = [0] * len(streams)
        self.line: list[deque[Hashable]] = [deque() for _ in streams]
        self.members: dict[Hashable, list[int]] = {}
        for rank, stream in enumerate(streams):
            for start, thing in stream:
                if start:
                    self.members.setdefault(thing, []).append(rank)
        self.turns = dict.fromkeys(self.members, 0)
        self.done: set[Hashable] = set()

    def run(self) -> list[tuple[int, int]]:
        moved = True
        while moved:
            moved = sum(self._advance(rank) for rank in range(len(self.streams))) > 0
        return [(rank, at) for rank, at in enumerate(self.at) if at < len(self.streams[rank])]

    def _advance(self, rank: int) -> bool:
        stream, begin = self.streams[rank], self.at[rank]
        while self.at[rank] < len(stream):
            start, thing = stream[self.at[rank]]
            if start:
                self.line[rank].append(thing)
                if len(self.line[rank]) == 1:
                    self._turn(thing)
            elif thing not in self.done:
                break
            self.at[rank] += 1
        return self.at[rank] > begin

    def _turn(self, thing: Hashable) -> None:
        """It is the turn of this thing on one more rank; with the last one it completes, and lines move on."""
        pending = [thing]
        while pending:
            thing = pending.pop()
            self.turns[thing] += 1
            if self.turns[thing] == len(self.members[thing]):
                self.done.add(thing)
                for rank in self.members[thing]:
                    self.line[rank].popleft()
                    if self.line[rank]:
                        pending.append(self.line[rank][0])
