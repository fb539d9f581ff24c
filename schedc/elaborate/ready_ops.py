"""Chooses the next op of a rank among those of its computed order that have not run, by the rule `Preferred`."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import inf

from schedc.elaborate.clock import CellRows, RankClock
from schedc.elaborate.rules import OpPattern, Preferred
from schedc.ir.ops import OpKind

_Key = tuple[int, int]
"""Kind and stage of an op. Ops with the same key run in the order of the text."""


@dataclass
class PreferencePool:
    """The ops of a rank's computed order that have not run, under the rule `Preferred`.

    rows: all ops of the order, as rows of the schedule, in the order of the text. left: how many of them have not run.
    """

    clock: RankClock
    rank: int
    rows: list[int]
    rule: Preferred

    def __post_init__(self) -> None:
        self.left = len(self.rows)
        self.queues: dict[_Key, list[int]] = {}
        for row in self.rows:
            self.queues.setdefault((self.clock.kind[row], self.clock.stage[row]), []).append(row)
        self.head = dict.fromkeys(self.queues, 0)
        self.preferences = [[self._keys(pattern) for pattern in patterns] for patterns in self.rule.preferences]
        fillers = [key for key in self.queues if self.rule.fill and key[0] == OpKind.W]
        self.preferences.append([[key for key in self.queues if key not in fillers]])
        self.fillers = fillers
        limits = list(enumerate(self.rule.limits))
        counted = [set(self._keys(limit.counted)) for _, limit in limits]
        freed = [set(self._keys(limit.freed)) for _, limit in limits]
        self.count = [0] * len(limits)
        self.limits = {key: [(n, [*counted[n]], limit.most[self.rank]) for n, limit in limits if key in counted[n]]
                       for key in self.queues}  # fmt: skip
        self.changes = {key: [(n, (key in counted[n]) - (key in freed[n])) for n, _ in limits] for key in self.queues}

    def _keys(self, pattern: OpPattern | None) -> list[_Key]:
        if pattern is None:
            return []
        stages = self.clock.schedule.placement.stage_of_chunk[self.rank].tolist()
        chosen = stages if pattern.chunk is None else [stages[pattern.chunk[self.rank]]]
        keys = [(int(pattern.kind), stage) for stage in chosen if stage >= 0]
        return [key for key in keys if key in self.queues]

    def choose(self, now: float) -> CellRows | None:
        """Take the op or pair to start at time ``now``; None to wait."""
        for keys_of_ops in self.preferences:
            cell: CellRows = ()
            for keys in keys_of_ops:
                if (row := self._first(keys, now)) is None:
                    break
                cell = (*cell, row)
            else:
                return self._taken(cell)
        filler = self._first(self.fillers, now)
        if filler is None or self._soonest() < now + self.clock.times.alone[OpKind.W][self.clock.stage[filler]]:
            return None
        return self._taken((filler,))

    def _taken(self, cell: CellRows) -> CellRows:
        for row in cell:
            self.head[self.clock.kind[row], self.clock.stage[row]] += 1
        self.left -= len(cell)
        return cell

    def _soonest(self) -> float:
        """The earliest arrival of an op that is within the limits and is no filler; inf if none is on its way."""
        keys = (key for key in self.queues if key not in self.fillers)
        heads = [self.queues[key][self.head[key]] for key in keys if self.head[key] < len(self.queues[key])]
        return min((self.clock.arrival(row) for row in heads if self._within(row)), default=inf)

    def _first(self, keys: list[_Key], now: float) -> int | None:
        """The first row in the text with one of these keys that may run at time ``now``."""
        first = None
        for key in keys:
            queue, head = self.queues[key], self.head[key]
            if head == len(queue) or (first is not None and queue[head] > first):
                continue
            if self.clock.ready(queue[head], now) and self._within(queue[head]):
                first = queue[head]
        return first

    def _within(self, row: int) -> bool:
        """Whether an op may start under every limit. Counted ops before it in the text that have not run count too."""
        for number, counted, most in self.limits[self.clock.kind[row], self.clock.stage[row]]:
            count = self.count[number]
            for key in counted:
                head = self.head[key]
                count += bisect_left(self.queues[key], row, head) - head
            if count >= most:
                return False
        return True

    def note(self, cell: CellRows) -> None:
        """Count an op or pair of the rank that has started, whether of the computed order or not."""
        for row in cell:
            key = self.clock.kind[row], self.clock.stage[row]
            for number, change in self.changes.get(key, ()):
                self.count[number] += change
