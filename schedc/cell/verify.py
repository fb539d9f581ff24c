"""Whether a cell program does all of its cell's work, once, and nothing before what it needs."""

from __future__ import annotations

from schedc.cell.graph import StageShape
from schedc.cell.program import Action, CellProgram, Half, Step
from schedc.cell.tasks import Task, Tasks, tasks_of
from schedc.diagnostics import Diagnostic


def verify(program: CellProgram, forward: StageShape | None, backward: StageShape | None) -> list[Diagnostic]:
    """Everything that is wrong with a cell program (S320); empty if it may run.

    Every segment of its halves runs once, every exchange is started once and waited for once, in this order; nothing
    runs or starts before all that it takes is complete; outputs and gradients leave no sooner than they are complete.
    """
    size = len(backward) if backward else 0
    recomputed = {step.node for step in program.steps if step.half is Half.RECOMPUTE and 0 <= step.node < size}
    tasks = tasks_of(program.kind, forward, backward, recomputed)
    of = {(task.half, task.node): at for at, task in enumerate(tasks.all)}
    strangers = [step for step in program.steps if (step.half, step.node) not in of]
    if strangers:
        return [_finding(program, f"{_bare(step)} is no step of this cell") for step in strangers]
    found: list[str] = []
    count = dict.fromkeys(((action, at) for at, task in enumerate(tasks.all) for action in _actions(task)), 0)
    complete: dict[int, int] = {}
    for number, step in enumerate(program.steps, start=1):
        at = of[step.half, step.node]
        if (step.action, at) not in count:
            found.append(f"step {number}: {step.action} of {tasks.all[at].name} does not apply to it")
            continue
        count[step.action, at] += 1
        found += _too_early(tasks, step, number, at, complete, count)
        if step.action is not Action.START:
            complete[at] = number
    found += [f"{tasks.all[at].name}: {times} times {action}" for (action, at), times in count.items() if times != 1]
    for what, said, wanted in zip(
        ("activation", "gradient"), (program.activation_at, program.gradient_at), tasks.leaving, strict=True
    ):
        due = -1 if wanted is None else max((complete.get(at, len(program.steps) + 1) for at in wanted), default=0)
        if (said < 0) != (due < 0) or not due <= said <= len(program.steps):
            found.append(f"the {what} leaves after step {said}, and is complete after step {due}")
    return [_finding(program, text) for text in found]


def _too_early(
    tasks: Tasks, step: Step, number: int, at: int, complete: dict[int, int], count: dict[tuple[Action, int], int]
) -> list[str]:
    """What a step needs that has not happened before it."""
    name = tasks.all[at].name
    if step.action is Action.WAIT:
        return [] if count[Action.START, at] else [f"step {number}: wait for {name}, which is not started"]
    return [
        f"step {number}: {step.action} of {name} before {tasks.all[before].name} is complete"
        for before in tasks.all[at].after
        if before not in complete
    ]


def _actions(task: Task) -> tuple[Action, ...]:
    return (Action.START, Action.WAIT) if task.exchange else (Action.RUN,)


def _bare(step: Step) -> str:
    return f"{step.action} of node {step.node}, half {step.half},"


def _finding(program: CellProgram, text: str) -> Diagnostic:
    return Diagnostic("S320", f"the program of a cell {program.kind} cannot run: {text}")
