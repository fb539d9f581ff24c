"""Latencies of messages between ranks, and the rule that tells slow links.

The latency of a message is the end of its wait less the later of its two posts. Only waits that blocked are counted,
because the receiver came too late to the others. A sender sees nothing of a slow link.

An ordered pair's latency is the lower quartile over `WINDOW` steps, as a multiple of its usual one. The median
of the other pairs is taken off. A link is slow above `SLOWER`, with `LEAST` more latency, in two windows in a row.
Plain numbers; no torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import median
from time import perf_counter_ns, time_ns
from typing import Any, NamedTuple

from schedc.ir.program import InstructionKind
from schedc_runtime.execute.executor import Executor, StreamTimes
from schedc_runtime.execute.instruction_names import receives
from schedc_runtime.speed.quantiles import lower_quartile

WINDOW = 5
"""Steps of a window."""
BASELINE = 12
"""Windows of a baseline."""
SLOWER, LEAST = 3.0, 2e6
"""A link is slow from this multiple of its usual latency on, if that is as many ns more."""
_BLOCKED = 50_000
"""Nanoseconds without the processor from which on a wait has blocked."""
_FEWEST = 3
"""Messages of a pair in a window, with fewer of which nothing is said."""
_SHORTEST = 1e5
"""Nanoseconds that a usual latency is taken for at least: below it, clocks and threads decide."""

Link = tuple[str, str]
"""The names of a sender and a receiver."""


class SlowLink(NamedTuple):
    """A link that has become slow. factor: of its usual latency. latency: ns. since: step from which on."""

    sender: str
    receiver: str
    factor: float
    latency: float
    since: int

    def told(self) -> str:
        """The alarm in words."""
        return (
            f"messages from {self.sender} to {self.receiver} take {self.latency / 1e6:.1f} ms,"
            f" {self.factor:.1f} times their usual latency, since step {self.since}"
        )


class _Arrival(NamedTuple):
    """A message that a rank receives. source: pipeline rank of the sender. posted, waited: steps of the stream."""

    message: int
    source: int
    posted: int
    waited: int


class LinkClock:
    """Posts and waits of one executor's steps.

    rank, replica: where it is in the mesh; a message has the same number in all replicas.
    """

    def __init__(self, executor: Executor, rank: int, replica: int) -> None:
        self.name, self._place = executor.name, [rank, replica]
        self._sends: dict[int, int] = {}
        self._arrivals: list[_Arrival] = []
        program, posted = executor.program, dict[int, int]()
        for position, step in enumerate(executor.code.steps):
            for row in range(step.row, step.row + step.width):
                message, kind = int(program.message[row]), InstructionKind(int(program.kind[row]))
                if kind is InstructionKind.SEND:
                    self._sends[message] = position
                elif kind is InstructionKind.RECV:
                    posted[message] = position
                elif kind is InstructionKind.WAIT and receives(program, row):
                    source = int(program.peer[row])
                    self._arrivals.append(_Arrival(message, source, posted[message], position))
        self._steps: list[list[list[list[int]]]] = []

    def end(self, times: StreamTimes) -> int:
        """Take in a step. Returns the number of steps since `take`."""
        shift, spent, ended = time_ns() - perf_counter_ns(), times.spent, times.ended
        assert ended is not None, "links are watched where ends are kept"
        sent = [[message, ended[position] + shift] for message, position in self._sends.items()]
        blocked = [
            [message, source, ended[posted] + shift, ended[waited] + shift]
            for message, source, posted, waited in self._arrivals
            if ended[waited] - ended[waited - 1] - spent[waited] > _BLOCKED
        ]
        self._steps.append([sent, blocked])
        return len(self._steps)

    def take(self) -> list[Any]:
        """What all ranks need to know of the steps so far, as JSON for `latencies`."""
        steps, self._steps = self._steps, []
        return [self.name, *self._place, steps]


def latencies(everyone: Sequence[list[Any]]) -> list[list[Any]]:
    """By pair of ranks with enough messages: sender, receiver, lower quartile in ns. everyone: `LinkClock.take` of all.

    Between machines a latency is as good as their clocks agree, as long as these do not drift.
    """
    names: dict[tuple[int, int], str] = {}
    sent: dict[tuple[int, int, int], int] = {}
    for name, rank, replica, steps in everyone:
        names[rank, replica] = name
        for number, (sends, _) in enumerate(steps):
            sent.update({(replica, number, message): when for message, when in sends})
    pairs: dict[tuple[str, str], list[int]] = {}
    for name, _, replica, steps in everyone:
        for number, (_, blocked) in enumerate(steps):
            for message, source, posted, ended in blocked:
                latency = ended - max(posted, sent[replica, number, message])
                pairs.setdefault((names[source, replica], name), []).append(latency)
    return [[*pair, lower_quartile(found)] for pair, found in sorted(pairs.items()) if len(found) >= _FEWEST]


class LinkRule:
    """Watches pairs of ranks, window by window."""

    def __init__(self) -> None:
        self._quiet: dict[Link, list[float]] = {}
        self._windows = 0
        self._suspects: dict[Link, int] = {}
        self._told: set[Link] = set()

    def window(self, first: int, found: Mapping[Link, float]) -> list[SlowLink]:
        """Take in the latencies of a window of steps from ``first`` on. Returns the links that are found."""
        self._windows += 1
        if self._windows <= BASELINE:
            for link, latency in found.items():
                self._quiet.setdefault(link, []).append(latency)
            return []
        changes = {
            link: log(max(latency, _SHORTEST) / max(median(self._quiet[link]), _SHORTEST))
            for link, latency in found.items()
            if link in self._quiet
        }
        slow: dict[Link, int] = {}
        alarms = []
        for link, change in changes.items():
            usual = median(self._quiet[link])
            others = median([value for other, value in changes.items() if other != link] or [0.0])
            if change - max(others, 0.0) <= log(SLOWER) or found[link] - usual <= LEAST:
                self._told.discard(link)
                continue
            slow[link] = self._suspects.get(link, first)
            if link in self._suspects and link not in self._told:
                self._told.add(link)
                alarms.append(SlowLink(*link, exp(change), found[link], slow[link]))
        self._suspects = slow
        return alarms
