"""A cell program in time: when every segment and exchange runs, and where compute stands and waits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from schedc.cell.costs import CellCosts
from schedc.cell.graph import QUEUES, StageShape
from schedc.cell.program import Action, CellProgram, Edge, Half
from schedc.cell.tasks import Task, Tasks, tasks_of


@dataclass(frozen=True)
class StepSpan:
    """A task and its time; as a wait, the time that compute stands for it."""

    task: Task
    begin: float
    end: float

    @property
    def time(self) -> float:
        return self.end - self.begin


class ArrivalTimes(NamedTuple):
    """When the rank is free for a cell, and the inputs of its forward and the gradients of its backward are there."""

    rank: float = 0.0
    inputs: float = -math.inf
    gradients: float = -math.inf


@dataclass(frozen=True)
class Played:
    """Times on the clock of the `ArrivalTimes`, in the unit of the cell's costs; by default from the start of the cell.

    spans: of all tasks, in the order of their starts in the program. waits: only those in which compute stands for an
    exchange. duration: when the cell ends. activation_at, gradient_at: when the outputs of the forward and the
    gradients of the inputs are complete; None where the cell has none.
    """

    tasks: Tasks
    costs: tuple[float, ...]
    spans: tuple[StepSpan, ...]
    waits: tuple[StepSpan, ...]
    duration: float
    activation_at: float | None
    gradient_at: float | None


def play(
    program: CellProgram,
    forward: StageShape | None,
    backward: StageShape | None,
    costs: CellCosts,
    backward_costs: CellCosts | None = None,
    arrivals: ArrivalTimes = ArrivalTimes(),  # noqa: B008 - a frozen value
) -> Played:
    """Runs a cell program on paper, step by step.

    Compute runs the segments in order. An exchange begins when compute has come to its start and its queue is free of
    the ones started before it; at a wait compute stands until its end, and where a half opens, until its message is
    there. ``backward_costs``: of the backward's stage, where they are not those of the forward's.
    """
    recomputed = {step.node for step in program.steps if step.half is Half.RECOMPUTE}
    tasks = tasks_of(program.kind, forward, backward, recomputed)
    duration = tasks.durations(costs, backward_costs or costs)
    of = {(task.half, task.node): at for at, task in enumerate(tasks.all)}
    clock, free = arrivals.rank, [-math.inf] * len(QUEUES)
    there = {Half.FORWARD: arrivals.inputs, Half.BACKWARD: arrivals.gradients}
    ends: dict[int, float] = {}
    spans: list[StepSpan] = []
    waits: list[StepSpan] = []
    complete: dict[Half, float] = {}
    for part in program.parts:
        if isinstance(part, Edge):
            if part.opens:
                clock = max(clock, there[part.half])
            else:
                complete[part.half] = clock
            continue
        action, half, node = part
        at = of[half, node]
        task, queue = tasks.all[at], tasks.queues[at]
        if action is Action.RUN:
            spans.append(StepSpan(task, clock, clock + duration[at]))
            clock += duration[at]
        elif action is Action.START:
            begin = max(clock, free[queue])
            ends[at] = free[queue] = begin + duration[at]
            spans.append(StepSpan(task, begin, ends[at]))
        elif ends[at] > clock:
            waits.append(StepSpan(task, clock, ends[at]))
            clock = ends[at]
    return Played(
        tasks,
        duration,
        tuple(spans),
        tuple(waits),
        clock,
        activation_at=complete.get(Half.FORWARD),
        gradient_at=complete.get(Half.BACKWARD),
    )
