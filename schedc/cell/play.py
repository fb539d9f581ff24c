"""A cell program in time: when every segment and exchange runs, and where compute stands and waits."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.cell.costs import CellCosts
from schedc.cell.graph import QUEUES, StageShape
from schedc.cell.program import Action, CellProgram, Half
from schedc.cell.tasks import Task, Tasks, tasks_of


@dataclass(frozen=True)
class Span:
    """A task and its time; as a wait, the time that compute stands for it."""

    task: Task
    begin: float
    end: float

    @property
    def time(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Played:
    """Times from the start of the cell, in the unit of its costs.

    spans: of all tasks, in the order of their starts in the program. waits: only those in which compute stands.
    activation_at, gradient_at: when the outputs of the forward and the gradients of the inputs are complete; None
    where the cell has none.
    """

    tasks: Tasks
    costs: tuple[float, ...]
    spans: tuple[Span, ...]
    waits: tuple[Span, ...]
    duration: float
    activation_at: float | None
    gradient_at: float | None


def play(
    program: CellProgram,
    forward: StageShape | None,
    backward: StageShape | None,
    costs: CellCosts,
    backward_costs: CellCosts | None = None,
) -> Played:
    """Runs a cell program on paper, step by step.

    Compute runs the segments in order. An exchange begins when compute has come to its start and its queue is free of
    the ones started before it; at a wait compute stands until its end. ``backward_costs``: of the backward's stage,
    where they are not those of the forward's.
    """
    again = {step.node for step in program.steps if step.half is Half.AGAIN}
    tasks = tasks_of(program.kind, forward, backward, again)
    duration = tasks.durations(costs, backward_costs or costs)
    of = {(task.half, task.node): at for at, task in enumerate(tasks.all)}
    clock, free = 0.0, [0.0] * len(QUEUES)
    ends: dict[int, float] = {}
    spans: list[Span] = []
    waits: list[Span] = []
    marks = {program.activation_at: 0.0, program.gradient_at: 0.0}
    for number, (action, half, node) in enumerate(program.steps, start=1):
        at = of[half, node]
        task, queue = tasks.all[at], tasks.queues[at]
        if action is Action.RUN:
            spans.append(Span(task, clock, clock + duration[at]))
            clock += duration[at]
        elif action is Action.START:
            begin = max(clock, free[queue])
            ends[at] = free[queue] = begin + duration[at]
            spans.append(Span(task, begin, ends[at]))
        elif ends[at] > clock:
            waits.append(Span(task, clock, ends[at]))
            clock = ends[at]
        if number in marks:
            marks[number] = clock
    return Played(
        tasks,
        duration,
        tuple(spans),
        tuple(waits),
        clock,
        activation_at=None if program.activation_at < 0 else marks[program.activation_at],
        gradient_at=None if program.gradient_at < 0 else marks[program.gradient_at],
    )
