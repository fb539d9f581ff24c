"""Simulates a cell on all ranks of an expert group in step: each has its own rows, and an exchange waits for the last.

An exchange begins on a queue when the last rank of the communicator has started it. It takes as long as on the rank
with the most rows. A rank that blocks for it stands *waiting* until it begins, and *exposed* while it is carried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from schedc.cell.costs import OF_ROWS, CellCosts
from schedc.cell.graph import QUEUES, Lane, StageShape
from schedc.cell.issue_order import ExpertRanks, scope
from schedc.cell.program import Action, CellProgram, Edge, Half, graph_of
from schedc.cell.simulate import Played, StepSpan
from schedc.cell.tasks import Tasks, tasks_of
from schedc.ir.arrays import Floats


@dataclass(frozen=True, eq=False)
class GroupTasks:
    """A cell program, and the times of its tasks on every rank of a group.

    members: [tasks] groups of ranks that exchange with each other; None for a segment, and where all ranks do. Empty
        for what asks the own host: every rank is alone.
    base: [tasks] times at the mean rows. layers: [tasks] number of the layer in the stage, -1 where rows do not matter.
    """

    program: CellProgram
    tasks: Tasks
    members: tuple[tuple[tuple[int, ...], ...] | None, ...]
    base: tuple[float, ...]
    layers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        program: CellProgram,
        forward: StageShape | None,
        backward: StageShape | None,
        costs: CellCosts,
        ranks: ExpertRanks | None = None,
    ) -> GroupTasks:
        """ranks: who exchanges with whom; None: all with all."""
        recomputed = {step.node for step in program.steps if step.half is Half.RECOMPUTE}
        tasks = tasks_of(program.kind, forward, backward, recomputed)
        nodes = [tasks.shape(task.half).nodes[task.node] for task in tasks.all]
        members = tuple(
            _members(tasks.shape(task.half), task.node, ranks) if task.exchange else None for task in tasks.all
        )
        layers = tuple(node.layer if node.role in OF_ROWS else -1 for node in nodes)
        return cls(program, tasks, members, tasks.durations(costs, costs), layers)


def _members(shape: StageShape, node: int, ranks: ExpertRanks | None) -> tuple[tuple[int, ...], ...] | None:
    """The ranks of each communicator that runs an exchange; None where one has all ranks of the group."""
    lane = shape.nodes[node].lane
    if lane is Lane.HOST:
        return ()
    if ranks is None:
        return None
    reach = scope(shape, node)
    names = dict.fromkeys(ranks.communicator(lane, reach, rank) for rank in range(ranks.size))
    return tuple(tuple(ranks.members(name)) for name in names) if len(names) > 1 else None


def play_ranks(cell: GroupTasks, factors: Floats) -> list[Played]:
    """[ranks] one cell that all ranks begin at time 0, as `schedc.cell.simulate.play` gives it.

    factors: [1, 1, ranks] rows of each rank over the mean.
    """
    times = task_times(cell, factors, factors)
    run = _GroupRun(cell, times, np.zeros((3, 1, factors.shape[2])))
    run.finish()
    return [run.on_rank(rank) for rank in range(factors.shape[2])]


def task_times(cell: GroupTasks, forward: Floats, backward: Floats) -> list[Floats]:
    """[tasks][cells or 1, ranks] times of a cell's tasks.

    forward, backward: [layers of the stage or 1, cells or 1, ranks] factors of rows in each half.
    """
    times: list[Floats] = []
    for index, task in enumerate(cell.tasks.all):
        factors = graph_of(cell.tasks.kind, task.half, forward, backward)
        time = np.full((1, factors.shape[2]), cell.base[index])
        if cell.layers[index] >= 0:
            own = factors[cell.layers[index] if len(factors) > 1 else 0]
            time = cell.base[index] * (_last(own, cell.members[index]) if task.exchange else own)
        times.append(time)
    return times


def _last(values: Floats, members: tuple[tuple[int, ...], ...] | None) -> Floats:
    """[cells, ranks] the largest value among the ranks of each rank's communicator."""
    if members is None:
        return np.broadcast_to(values.max(axis=-1, keepdims=True), values.shape)
    last = np.array(values)
    for ranks in members:
        last[..., ranks] = values[..., ranks].max(axis=-1, keepdims=True)
    return last


_Spent = Literal["task", "exposed", "waiting"]


class _GroupRun:
    """The clocks of all ranks, and when each of their queues is free."""

    def __init__(self, cell: GroupTasks, times: Sequence[Floats], arrivals: Floats) -> None:
        self.cell, self.times = cell, times
        self.clock = arrivals[0]
        self.message = {Half.FORWARD: arrivals[1], Half.BACKWARD: arrivals[2]}
        shape = self.clock.shape
        self.free = [np.full(shape, -math.inf) for _ in QUEUES]
        self.begun: dict[int, tuple[Floats, Floats, Floats]] = {}
        self.complete: dict[Half, Floats] = {}
        self.task_of = {(task.half, task.node): index for index, task in enumerate(cell.tasks.all)}
        self.spans: list[tuple[_Spent, int, Floats, Floats]] = []

    def finish(self) -> None:
        """Run the whole program."""
        act = {Action.RUN: self.compute_segment, Action.START: self.start, Action.WAIT: self.wait}
        for part in self.cell.program.parts:
            if isinstance(part, Edge):
                self.meet_message(part)
            else:
                act[part.action](self.index(part.half, part.node))

    def index(self, half: Half, node: int) -> int:
        return self.task_of[half, node]

    def meet_message(self, edge: Edge) -> None:
        if edge.opens:
            self.clock = np.maximum(self.clock, self.message[edge.half])
        else:
            self.complete[edge.half] = self.clock

    def compute_segment(self, index: int) -> None:
        self.spans.append(("task", index, self.clock, self.clock + self.times[index]))
        self.clock = self.clock + self.times[index]

    def start(self, index: int) -> None:
        queue = self.cell.tasks.queues[index]
        own = np.maximum(self.clock, self.free[queue])
        begin = _last(own, self.cell.members[index])
        self.free[queue] = begin + self.times[index]
        self.begun[index] = own, begin, self.free[queue]
        self.spans.append(("task", index, begin, self.free[queue]))

    def wait(self, index: int) -> None:
        own, begin, end = self.begun[index]
        blocked = np.maximum(end - self.clock, 0.0)
        waiting = np.clip(begin - np.maximum(self.clock, own), 0.0, blocked)
        start = np.maximum(self.clock, own)  # before it, an earlier exchange of the queue is carried
        self.spans.append(("exposed", index, self.clock, np.minimum(start, end)))
        self.spans.append(("waiting", index, start, start + waiting))
        self.spans.append(("exposed", index, start + waiting, end))
        self.clock = np.maximum(self.clock, end)

    def on_rank(self, rank: int) -> Played:
        """The first cell of the batch on one rank."""

        def spans(spent: _Spent) -> tuple[StepSpan, ...]:
            ranks = ((self.cell.tasks.all[i], b[0, rank], e[0, rank]) for what, i, b, e in self.spans if what == spent)
            return tuple(
                StepSpan(task, float(begin), float(end)) for task, begin, end in ranks if spent == "task" or end > begin
            )

        complete = (self.complete.get(half) for half in (Half.FORWARD, Half.BACKWARD))
        activation_at, gradient_at = (None if time is None else float(time[0, rank]) for time in complete)
        costs = tuple(float(time[0, rank]) for time in self.times)
        return Played(
            self.cell.tasks, costs, spans("task"), spans("exposed"), float(self.clock[0, rank]), activation_at,
            gradient_at, spans("waiting"),
        )  # fmt: skip
