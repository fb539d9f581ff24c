"""Prices a program whose messages queue on communicators, and chooses the communicators.

A communicator is a queue on each of its ranks, and so is a lane of works. The messages of one post on one communicator
are a group:

    start   of a group on a rank: the group before it in the queue has ended, and compute has reached its post
    moves   a message moves when both of its ends have started, for the time of a message
    end     of a group: all its messages have moved
    WAIT    compute waits for the group of the message; the host never waits
    START   of a work: the work before it on its lane has ended, and compute has reached its START
    JOIN    compute waits for the work

Instructions, groups and works are lowered to one table, which `schedc.step.walk` runs like every other step. All
messages of a cell leave at its end. Exchanges of experts lie inside cells: `schedc.cell` has their queues.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Floats, Int8, Int32, Int64, bincount, repeat
from schedc.ir.communicators import ASSIGNMENTS, MOST, Ends, sends_of
from schedc.ir.program import InstructionKind, Program, computation
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.numba_kernels import MAX, PACE, kernels
from schedc.step.program import loops
from schedc.step.timeline import durations
from schedc.step.walk import Walk, run

WORTH = 1e-3
"""How much longer a step may take than with each message alone, for fewer communicators."""

_NUMPY_INPUT = 5e-7
"""Seconds in which Python sorts an input, roughly: what decides whether to load the compiled loop."""

_SEND, _RECV, _WAIT = InstructionKind.SEND, InstructionKind.RECV, InstructionKind.WAIT
_START, _JOIN = InstructionKind.START, InstructionKind.JOIN


@dataclass(frozen=True, eq=False)
class QueuedProgram:
    """What the instructions of a program compute, post and wait for.

    rank_start: [P + 1]; kind: [rows]; message: [rows] position of the message of SEND, RECV and WAIT, else -1.
    batch: [messages] number of the batch, or -1. duration: [cells] in the order of the instructions; latency: time of a
    message, in the same unit. work: [rows] number of the work of START and JOIN; lane: [works] the queue of each, and
    time: [works] on it; slowdown: [lanes] by how much more a cell takes while a lane of its rank is busy.
    """

    ends: Ends
    rank_start: Int64
    kind: Int8
    message: Int64
    batch: Int32
    duration: Floats
    latency: float
    work: Int64
    lane: Int8
    time: Floats
    slowdown: Floats

    @classmethod
    def of(
        cls, program: Program, costs: Costs, time: Floats | None = None, duration: Floats | None = None
    ) -> QueuedProgram:
        """A program whose messages match, under costs of its stages or of all stages.

        time: [works] of the program on their lanes; None: works take no time. duration: [cells] from inside, where the
        costs have a table of cells.
        """
        stage_costs = costs.resolved(program.stages)
        if duration is None:
            duration = durations(Dependencies.of(computation(program)[0]), stage_costs)
        sends = sends_of(program)
        message = np.full(len(program), -1, np.int64)
        of_messages = (program.kind >= _SEND) & (program.kind <= _WAIT)
        message[of_messages] = np.searchsorted(program.message[sends], program.message[of_messages])
        rows = program.rank_start, program.kind, message, program.batch[sends]
        time = np.zeros(len(program.works)) if time is None else time
        works = program.work.astype(np.int64), program.works.queue, time, stage_costs.slowdown
        return cls(Ends.of(program), *rows, duration, stage_costs.p2p, *works)

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
        """When the last cell and the last work end. communicator: [messages] of each; None: each is alone.

        Infinite where the messages deadlock on these queues.
        """
        group = self._groups(communicator)
        clocks = int((~self.posts).sum())
        works = clocks + int(group.max(initial=-1)) + 1
        total = works + self.time.size
        target, source, lag = self._inputs(communicator, group, clocks, works)
        by_target = np.argsort(target, kind="stable")
        first = np.concatenate([[0], np.cumsum(bincount(target, minlength=total))])
        source, lag = source[by_target], lag[by_target]
        order = _in_order(first, source)
        if order.size < total:
            return float("inf")
        place = np.empty(total + 1, np.int32)
        place[order], place[-1] = np.arange(total), -1
        count = np.diff(first)[order]
        begin = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
        inputs = repeat(first[:-1][order] - begin[:-1], count) + np.arange(source.size)
        cells = np.flatnonzero(self.kind[~self.posts] <= InstructionKind.CELL)
        own, op = np.full(total, -1, np.int32), np.full(total, MAX, np.int8)
        own[cells], own[clocks:works] = np.arange(cells.size), cells.size
        own[works:] = cells.size + 1 + np.arange(self.time.size)
        op[cells] = PACE if (lag < 0).any() else MAX
        walk = Walk(op[order], begin, place[source[inputs]], lag[inputs], own[order])
        adds = np.concatenate([self.duration, [self.latency], self.time])[:, None]
        watch = place[np.concatenate([cells, np.arange(works, total)])]
        return float(run(walk, np.append(0.0, self.slowdown)[:, None], adds, watch=watch).max(initial=0.0))

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

    def _inputs(self, communicator: Int32 | None, group: Int64, clocks: int, works: int) -> tuple[Int64, Int64, Int32]:
        """[inputs] the instruction that waits, the one that it waits for, and a row of lags as of `Walk`.

        The instructions are the rows besides posts, then groups from ``clocks`` on, then works from ``works`` on.
        """
        posts, others, waits, starts, joins = (
            np.flatnonzero(each)
            for each in (self.posts, ~self.posts, self.kind == _WAIT, self.kind == _START, self.kind == _JOIN)
        )
        posted, number = group[self.message[posts]], np.cumsum(~self.posts) - 1
        inputs = [
            (number[others], self.clock[others]),
            (number[waits], clocks + group[self.message[waits]]),
            (number[joins], works + self.work[joins]),
            (clocks + posted, self.clock[posts]),
            (works + self.work[starts], self.clock[starts]),
            self._behind(starts, self.lane[self.work[starts]], works + self.work[starts]),
        ]
        if communicator is not None:
            inputs.append(self._behind(posts, communicator[self.message[posts]], clocks + posted))
        lags = [np.zeros(target.size, np.int32) for target, _ in inputs]
        cells = np.flatnonzero(self.kind <= InstructionKind.CELL)
        for lane in np.flatnonzero(self.slowdown > 0).tolist():
            own = starts[self.lane[self.work[starts]] == lane]
            last = np.append(own, -1)[np.searchsorted(own, cells) - 1]
            busy = last >= self.rank_start[self._rank_of(cells)]
            inputs.append((number[cells[busy]], works + self.work[last[busy]]))
            lags.append(np.full(int(busy.sum()), ~(1 + lane), np.int32))
        target, source = (np.concatenate(parts) for parts in zip(*inputs, strict=True))
        return target, source, np.concatenate(lags)

    def _behind(self, rows: Int64, queue: Int32 | Int8, item: Int64) -> tuple[Int64, Int64]:
        """The items that wait for another in their queue on a rank, and these. All [rows], in the order of the rows."""
        of_rank = self._rank_of(rows) * (np.int64(queue.max(initial=0)) + 1) + queue
        by_queue = np.argsort(of_rank, kind="stable")
        before, after = by_queue[:-1], by_queue[1:]
        follows = (of_rank[before] == of_rank[after]) & (item[before] != item[after])
        return item[after[follows]], item[before[follows]]

    def _rank_of(self, rows: Int64) -> Int64:
        return np.asarray(np.searchsorted(self.rank_start, rows, side="right") - 1)


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
    one: when the last cell and work end under it, with each message alone, and under one communicator.
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


def queued_messages(
    program: Program,
    costs: Costs,
    posted: Program | None = None,
    time: Floats | None = None,
    duration: Floats | None = None,
) -> ChosenCommunicators | None:
    """The communicators of a program, chosen again; of ``posted``, its messages as a file posts them, if there are any.

    None where messages take no time, and their order follows the times of cells: no message waits for another.

    costs: as of `QueuedProgram.of`, by which the program was ordered; so are time [works] of ``program`` and duration
    [cells]. A ``program`` whose communicators nobody has read yet then has these, or none where one is enough.
    """
    if posted is not None:
        return choose_communicators(QueuedProgram.of(posted, costs, None, duration), program.plan.communicators)
    chosen = None
    if costs.p2p or costs.cell is not None or len(program.works):
        chosen = choose_communicators(QueuedProgram.of(program, costs, time, duration), program.plan.communicators)
    program.settle(chosen.communicator if chosen is not None and chosen.per_rank > 1 else np.zeros(0, np.int32))
    return chosen
