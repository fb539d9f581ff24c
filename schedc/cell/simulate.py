"""Simulates a cell program: when every segment and exchange runs, and where compute blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from schedc.cell.costs import CellCosts
from schedc.cell.graph import QUEUES, StageShape
from schedc.cell.program import Action, CellProgram, CellStep, Edge, Half
from schedc.cell.tasks import Task, Tasks, tasks_of_program


@dataclass(frozen=True)
class StepSpan:
    """A task and its time: begin and end in the unit of the cell's costs. For a wait, the time that compute blocks."""

    task: Task
    begin: float
    end: float

    @property
    def time(self) -> float:
        return self.end - self.begin


class ArrivalTimes(NamedTuple):
    """When the rank of a cell is free, the forward's inputs arrive, and the backward's gradients arrive."""

    rank: float = 0.0
    inputs: float = -math.inf
    gradients: float = -math.inf


@dataclass(frozen=True)
class Played:
    """A simulated cell. Times are on the clock of its `ArrivalTimes`, in the unit of the cell's costs.

    costs: [tasks] times. spans: of all tasks, in the order in which the program starts them.
    waits: the times in which compute blocks for an exchange. standing: times in which compute blocks
        until a fuller rank starts an exchange; ``waits`` has the other times.
    duration: when the cell ends.
    activation_at, gradient_at: when the outputs of the forward, and the gradients of the backward's inputs, are
        complete; None where the cell has none.
    """

    tasks: Tasks
    costs: tuple[float, ...]
    spans: tuple[StepSpan, ...]
    waits: tuple[StepSpan, ...]
    duration: float
    activation_at: float | None
    gradient_at: float | None
    standing: tuple[StepSpan, ...] = ()


def play(
    program: CellProgram,
    forward: StageShape | None,
    backward: StageShape | None,
    costs: CellCosts,
    backward_costs: CellCosts | None = None,
    arrivals: ArrivalTimes = ArrivalTimes(),  # noqa: B008 - a frozen value
) -> Played:
    """Simulates a cell program, step by step; times in the unit of ``costs``.

    Compute runs the segments in order. An exchange begins when compute reaches its start and its queue is free of
    earlier exchanges. At a wait, compute blocks until the exchange ends. Where a half opens, compute blocks until the
    half's message is there. backward_costs: costs of the backward's stage where they differ from ``costs``.
    """
    tasks = tasks_of_program(program, forward, backward)
    return play_tasks(program, tasks, tasks.durations(costs, backward_costs or costs), arrivals)


def play_tasks(
    program: CellProgram,
    tasks: Tasks,
    duration: tuple[float, ...],
    arrivals: ArrivalTimes = ArrivalTimes(),  # noqa: B008 - a frozen value
) -> Played:
    """`play` under times of the tasks, [tasks] in one unit."""
    run = _Run(tasks, duration, arrivals)
    for part in program.parts:
        if isinstance(part, Edge):
            run.meet_message(part)
        else:
            run.step(part)
    return Played(
        tasks,
        run.duration,
        tuple(run.spans),
        tuple(run.waits),
        run.clock,
        activation_at=run.complete.get(Half.FORWARD),
        gradient_at=run.complete.get(Half.BACKWARD),
    )


class _Run:
    """The clock of compute, and when each queue of exchanges is free."""

    def __init__(self, tasks: Tasks, duration: tuple[float, ...], arrivals: ArrivalTimes) -> None:
        self.tasks, self.duration = tasks, duration
        self.clock, self.free = arrivals.rank, [-math.inf] * len(QUEUES)
        self.message = {Half.FORWARD: arrivals.inputs, Half.BACKWARD: arrivals.gradients}
        self.ends: dict[int, float] = {}
        self.spans: list[StepSpan] = []
        self.waits: list[StepSpan] = []
        self.complete: dict[Half, float] = {}

    def meet_message(self, edge: Edge) -> None:
        """A half opens and needs its message, or is complete."""
        if edge.opens:
            self.clock = max(self.clock, self.message[edge.half])
        else:
            self.complete[edge.half] = self.clock

    def step(self, step: CellStep) -> None:
        index = self.tasks.number[step.half, step.node]
        task, queue = self.tasks.all[index], self.tasks.queues[index]
        if step.action is Action.RUN:
            begin, self.clock = self.clock, self.clock + self.duration[index]
            self.spans.append(StepSpan(task, begin, self.clock))
        elif step.action is Action.START:
            begin = max(self.clock, self.free[queue])
            self.ends[index] = self.free[queue] = begin + self.duration[index]
            self.spans.append(StepSpan(task, begin, self.ends[index]))
        elif self.ends[index] > self.clock:
            self.waits.append(StepSpan(task, self.clock, self.ends[index]))
            self.clock = self.ends[index]
