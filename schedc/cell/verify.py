"""Checks that a cell program does all of its cell's work once, and nothing before its dependencies."""

from __future__ import annotations

from schedc.cell.graph import StageShape
from schedc.cell.program import Action, CellProgram, CellStep, Half, graph_of
from schedc.cell.tasks import Task, Tasks, tasks_of
from schedc.diagnostics import Diagnostic


def verify_cell(program: CellProgram, forward: StageShape | None, backward: StageShape | None) -> list[Diagnostic]:
    """All findings about a cell program (S320); empty if it may run.

    Every segment of its halves runs once. Every exchange is started once and then waited for once. Nothing runs or
    starts before its dependencies are complete. Outputs and gradients leave no sooner than they are complete.
    """
    graph = graph_of(program.kind, Half.RECOMPUTE, forward, backward)
    size = len(graph) if graph else 0
    recomputed = {step.node for step in program.steps if step.half is Half.RECOMPUTE and 0 <= step.node < size}
    tasks = tasks_of(program.kind, forward, backward, recomputed)
    strangers = [step for step in program.steps if (step.half, step.node) not in tasks.number]
    if strangers:
        return [_finding(program, f"{_bare(step)} is no step of this cell") for step in strangers]
    complaints: list[str] = []
    count = dict.fromkeys(((action, index) for index, task in enumerate(tasks.all) for action in _actions(task)), 0)
    complete: dict[int, int] = {}
    for number, step in enumerate(program.steps, start=1):
        index = tasks.number[step.half, step.node]
        if (step.action, index) not in count:
            complaints.append(f"step {number}: {step.action} of {tasks.all[index].name} does not apply to it")
            continue
        count[step.action, index] += 1
        complaints += _too_early(tasks, step, number, index, complete, count)
        if step.action is not Action.START:
            complete[index] = number
    complaints += [
        f"{tasks.all[index].name}: {times} times {action}" for (action, index), times in count.items() if times != 1
    ]
    for output, leaves, wanted in zip(
        ("activation", "gradient"), (program.activation_at, program.gradient_at), tasks.leaving, strict=True
    ):
        due = (
            -1 if wanted is None else max((complete.get(index, len(program.steps) + 1) for index in wanted), default=0)
        )
        if (leaves < 0) != (due < 0) or not due <= leaves <= len(program.steps):
            complaints.append(f"the {output} leaves after step {leaves}, and is complete after step {due}")
    return [_finding(program, text) for text in complaints]


def _too_early(
    tasks: Tasks,
    step: CellStep,
    number: int,
    index: int,
    complete: dict[int, int],
    count: dict[tuple[Action, int], int],
) -> list[str]:
    """Complaints about what a step needs and what has not happened before it."""
    name = tasks.all[index].name
    if step.action is Action.WAIT:
        return [] if count[Action.START, index] else [f"step {number}: wait for {name}, which is not started"]
    return [
        f"step {number}: {step.action} of {name} before {tasks.all[before].name} is complete"
        for before in tasks.all[index].after
        if before not in complete
    ]


def _actions(task: Task) -> tuple[Action, ...]:
    return (Action.START, Action.WAIT) if task.exchange else (Action.RUN,)


def _bare(step: CellStep) -> str:
    return f"{step.action} of node {step.node}, half {step.half},"


def _finding(program: CellProgram, text: str) -> Diagnostic:
    return Diagnostic("S320", f"the program of a cell {program.kind} cannot run: {text}")
