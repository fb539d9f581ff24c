"""Which communicator carries each message: a fixed list of assignments, by rank, direction and channel.

A communicator is one queue on each of its ranks. Its messages complete there in the order in which they are posted;
those of different communicators do not wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Int8, Int32, Int64, bincount
from schedc.ir.program import Channel, InstructionKind, Program

ASSIGNMENTS = (
    "one", "direction", "pair", "channel", "edge", "direction and channel", "pair and channel", "edge and channel",
)  # fmt: skip
"""What may tell communicators apart.

direction: messages to higher ranks and messages to lower ones. pair: the two ranks. edge: the sending and the receiving
rank. channel: activations and gradients.
"""

MOST = 4
"""The most communicators of a rank, where a plan does not say."""


@dataclass(frozen=True, eq=False)
class Ends:
    """The ends of all messages, by number. source, destination: [messages] ranks; channel: [messages] `Channel`."""

    source: Int32
    destination: Int32
    channel: Int8
    ranks: int

    @classmethod
    def of(cls, program: Program) -> Ends:
        """Those of a program whose messages match, by ascending number."""
        sends = sends_of(program)
        return cls(program.rank[sends], program.peer[sends], program.channel[sends], program.ranks)

    def assigned(self, assignment: str) -> Int32:
        """[messages] the communicators under one of `ASSIGNMENTS`, numbered from 0."""
        apart, _, _ = assignment.partition(" and ")
        low, high = np.minimum(self.source, self.destination), np.maximum(self.source, self.destination)
        code = {
            "direction": (self.destination > self.source).astype(np.int64),
            "pair": low.astype(np.int64) * self.ranks + high,
            "edge": self.source.astype(np.int64) * self.ranks + self.destination,
        }.get(apart, np.zeros(self.source.size, np.int64))
        if assignment.endswith("channel"):
            code = 2 * code + self.channel
        return np.asarray(np.unique(code, return_inverse=True)[1], np.int32)

    def per_rank(self, communicator: Int32) -> int:
        """The most communicators that a rank takes part in. communicator: [messages]."""
        count = int(communicator.max(initial=0)) + 1
        ranks = np.concatenate([self.source, self.destination]).astype(np.int64)
        uses = np.unique(ranks * count + np.tile(communicator, 2))
        return int(bincount(uses // count).max(initial=1))


def sends_of(program: Program) -> Int64:
    """[messages] the row of the SEND of each message, by ascending number."""
    sends = np.flatnonzero(program.kind == InstructionKind.SEND)
    return np.asarray(sends[np.argsort(program.message[sends], kind="stable")])


def communicators_of(program: Program) -> Int32:
    """[messages] the communicator of each message, by ascending number; 0 where the program says nothing."""
    return program.communicators if program.communicators.size else np.zeros(sends_of(program).size, np.int32)


def communicators_like(program: Program, other: Program) -> Int32:
    """[messages] the communicators of a program whose messages ``other`` has, too: each as there; empty for one."""
    if not other.communicators.size:
        return other.communicators
    own, others = (_values(each, program.stages) for each in (program, other))
    by_value = np.argsort(others)
    return np.asarray(other.communicators[by_value[np.searchsorted(others, own, sorter=by_value)]])


def _values(program: Program, stages: int) -> Int64:
    """[messages] a number for the channel, stage and microbatch of each message, by ascending number of the message."""
    rows = sends_of(program)
    microbatch = program.microbatch[rows].astype(np.int64)
    return np.asarray((microbatch * len(Channel) + program.channel[rows]) * stages + program.stage[rows])


def ranks_of_communicators(program: Program) -> list[list[int]]:
    """The ranks of each communicator, ascending; those of a number that no message has are none."""
    ends, communicator = Ends.of(program), communicators_of(program)
    count = int(communicator.max(initial=-1)) + 1
    ranks = np.concatenate([ends.source, ends.destination]).astype(np.int64)
    uses: Int64 = np.unique(np.tile(communicator, 2) * np.int64(ends.ranks) + ranks)
    return [(uses[uses // ends.ranks == number] % ends.ranks).tolist() for number in range(count)]
