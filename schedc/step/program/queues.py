"""Prices a program whose messages queue on communicators, and chooses the communicators.

A communicator is a queue on each of its ranks, and so is a lane of works. The messages of one post on one communicator
are a group:

    start   of a group on a rank: the group before it in the queue has ended, and compute has reached its post
    moves   a message moves when both of its ends have started, for the time of a message
    end     of a group: all its messages have moved
    WAIT    compute waits for the group of the message; the host never waits

Instructions and groups are lowered to one table, which `schedc.step.walk` runs like every other step. All messages
of a cell leave at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int8, Int32, Int64, bincount, repeat
from schedc.ir.communicators import ASSIGNMENTS, MOST, Ends
from schedc.ir.program import InstructionKind, Program, computation
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.numba_kernels import kernels
from schedc.step.program import loops
from schedc.step.timeline import durations
from schedc.step.walk import Walk, run

WORTH = 1e-3
"""How much longer a step may take than with each message alone, for fewer communicators."""

_NUMPY_INPUT = 5e-7
"""Seconds in which Python sorts an input, roughly: what decides whether to load the compiled loop."""

_SEND, _RECV, _WAIT = InstructionKind.SEND, InstructionKind.RECV, InstructionKind.WAIT


@dataclass(frozen=True, eq=False)
class QueuedProgram:
    """What the instructions of a program compute, post and wait for.

    rank_start: [P + 1]; kind: [rows]; message: [rows] position of the message of SEND, RECV and WAIT, else -1.
    batch: [messages] number of the batch, or -1. duration: [cells] in the order of the instructions; latency: time of a
    message, in the same unit.
    """

    ends: Ends
    rank_start: Int64
    kind: Int8
    message: Int64
    batch: Int32
    duration: Floats
    latency: float

    @classmethod
    def of(cls, program: Program, costs: Costs) -> QueuedProgram:
        """A program whose messages match, under costs of its stages or of all stages."""
        schedule, _ = computation(program)
        stage_costs = costs.resolved(program.stages)
        duration = durations(Dependencies.of(schedule), stage_costs)
        sends = np.flatnonzero(program.kind == _SEND)
        sends = sends[np.argsort(program.message[sends], kind="stable")]
        message = np.full(len(program), -1, np.int64)
        of_messages = (program.kind >= _SEND) & (program.kind <= _WAIT)
        message[of_messages] = np.searchsorted(program.message[sends], program.message[of_messages])
        rows = program.rank_start, program.kind, message, program.batch[sends]
        return cls(Ends.of(program), *rows, duration, stage_costs.p2p)

    @cached_property
    def posts(self) -> Bools:
        """[rows] whether the row posts a message."""
        return np.isin(self.kind, (_SEND, _RECV))

    @cached_property
    def clock(self) -> Int64:
        """[rows] the rows besides posts in front of each on its rank, the number of the last one; -1: none."""
        others = np.concatenate([[0], np.cumsum(~self.posts)])
        first = repeat(others[self.rank_start[:-1]], np.diff(self.rank_start))
        return np.where(others[:-1] > first, others[:-1] - 1, -1)

    def makespan(self, communicator: Int32 | None) -> float:
        """When the last cell ends. communicator: [messages] of each message; None: each is alone.

        Infinite where the messages deadlock on these queues.
        """
        clocks = int((~self.posts).sum())
        group = self._groups(communicator)
        groups = int(group.max(initial=-1)) + 1
        target, source = self._inputs(communicator, group, clocks)
        by_target = np.argsort(target, kind="stable")
        first = np.concatenate([[0], np.cumsum(bincount(target, minlength=clocks + groups))])
        source = source[by_target]
        order = _in_order(first, source)
        if order.size < first.size - 1:
            return float("inf")
        place = np.empty(order.size + 1, np.int32)
        place[order], place[-1] = np.arange(order.size), -1
        count = np.diff(first)[order]
        begin = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
        inputs = repeat(first[:-1][order] - begin[:-1], count) + np.arange(source.size)
        cells = np.flatnonzero(self.kind[~self.posts] <= InstructionKind.CELL)
        own = np.full(order.size, self.duration.size, np.int32)
        own[:clocks] = -1
        own[cells] = np.arange(cells.size)
        walk = Walk(
            np.zeros(order.size, np.int8), begin, place[source[inputs]], np.zeros(source.size, np.int32), own[order]
        )
        adds = np.append(self.duration, self.latency)[:, None]
        return float(run(walk, np.zeros((1, 1)), adds, watch=place[cells]).max(initial=0.0))

    def _groups(self, communicator: Int32 | None) -> Int64:
        """[messages] the group of each message, numbered from 0."""
        group = np.arange(self.batch.size)
        if communicator is None or not (self.batch >= 0).any():
            return group
        joined = np.flatnonzero(self.batch >= 0)
        code = self.batch[joined].astype(np.int64) * (int(communicator.max()) + 1) + communicator[joined]
        _, first, same = np.unique(code, return_index=True, return_inverse=True)
        group[joined] = joined[first][same]
        return np.asarray(np.unique(group, return_inverse=True)[1])

    def _inputs(self, communicator: Int32 | None, group: Int64, clocks: int) -> tuple[Int64, Int64]:
        """[inputs] each instruction that waits, and what for: first the rows besides posts, then the groups."""
        others, waits = np.flatnonzero(~self.posts), np.flatnonzero(self.kind == _WAIT)
        posts = np.flatnonzero(self.posts)
        posted = group[self.message[posts]]
        number = np.cumsum(~self.posts) - 1
        inputs = [
            (number[others], self.clock[others]),
            (number[waits], clocks + group[self.message[waits]]),
            (clocks + posted, self.clock[posts]),
        ]
        if communicator is not None:
            rank = np.searchsorted(self.rank_start, posts, side="right") - 1
            queue = rank * (np.int64(communicator.max(initial=0)) + 1) + communicator[self.message[posts]]
            by_queue = np.argsort(queue, kind="stable")
            before, after = by_queue[:-1], by_queue[1:]
            follows = (queue[before] == queue[after]) & (posted[before] != posted[after])
            inputs.append((clocks + posted[after[follows]], clocks + posted[before[follows]]))
        target, source = (np.concatenate(parts) for parts in zip(*inputs, strict=True))
        return target, source


def _in_order(first: Int64, source: Int64) -> Int64:
    """[n] the instructions, each behind its inputs; fewer where some wait for each other in a circle.

    first: [n + 1] instruction i waits for source[first[i]] ..< source[first[i + 1]]; -1: for nothing.
    """
    target = repeat(np.arange(first.size - 1), np.diff(first))
    there = np.flatnonzero(source >= 0)
    readers = target[there[np.argsort(source[there], kind="stable")]]
    read = np.concatenate([[0], np.cumsum(bincount(source[there], minlength=first.size - 1))])
    missing = bincount(target[there], minlength=first.size - 1)
    order = np.zeros(first.size - 1, np.int64)
    if compiled := kernels(source.size * _NUMPY_INPUT):
        return order[: compiled(loops.sort_by_inputs)(read, readers, missing, order)]
    listed = order.tolist()
    reached = loops.sort_by_inputs(read.tolist(), readers.tolist(), missing.tolist(), listed)
    return np.array(listed[:reached], np.int64)


class ChosenCommunicators(NamedTuple):
    """The assignment of communicators to the messages of a program, and what it costs.

    name: one of `ASSIGNMENTS`. per_rank: the most communicators of a rank. communicator: [messages]. makespan, alone,
    one: when the last cell ends under it, with each message alone, and under one communicator.
    """

    name: str
    per_rank: int
    communicator: Int32
    makespan: float
    alone: float
    one: float


def choose_communicators(program: QueuedProgram, most: int = 0) -> ChosenCommunicators:
    """The smallest assignment within `WORTH` of each message alone, or the fastest with at most ``most`` on a rank.

    most: 0 for `MOST`. Of assignments as large and as fast the first one of `ASSIGNMENTS` counts.
    """
    alone, ends = program.makespan(None), program.ends
    candidates = [(ends.per_rank(each), name, each) for name in ASSIGNMENTS for each in (ends.assigned(name),)]
    tried: list[ChosenCommunicators] = []
    for size, name, communicator in sorted(candidates, key=lambda each: each[0]):
        if tried and size > (most or MOST):
            break
        makespan = program.makespan(communicator)
        one = tried[0].one if tried else makespan
        tried.append(ChosenCommunicators(name, size, communicator, makespan, alone, one))
        if makespan <= alone * (1 + WORTH):
            return tried[-1]
    return min(tried, key=lambda each: each.makespan)


def needed_communicators(program: Program, costs: Costs) -> Int32:
    """[messages] the communicators of a program without any, as `choose_communicators` says; empty for one."""
    chosen = queued_messages(program, costs)
    return chosen.communicator if chosen.per_rank > 1 else np.zeros(0, np.int32)


def queued_messages(program: Program, costs: Costs, posted: Program | None = None) -> ChosenCommunicators:
    """The communicators of a program, chosen again; of ``posted``, its messages as a file posts them, if there are any.

    costs: of its stages or of all stages.
    """
    return choose_communicators(QueuedProgram.of(posted or program, costs), program.plan.communicators)
