"""A cell alone on all ranks of an expert group: spans of its tasks and of its waits, for drawings."""

from __future__ import annotations

import numpy as np

from schedc.cell.costs import CellCosts
from schedc.cell.group import GroupTasks, task_times
from schedc.cell.program import Action, Half
from schedc.cell.simulate import Played, StepSpan
from schedc.ir.arrays import Floats
from schedc.step.cells.group_pricing import GroupPricing, KindOfCell
from schedc.step.cells.played_cells import PlayedCell, RankSets, blocked_at, play
from schedc.step.lowering import CellInstructions
from schedc.step.walk import Walk, run


def cells_on_ranks(group: GroupPricing, kind: KindOfCell, costs: CellCosts) -> list[Played]:
    """[ranks] a cell of one kind at the mean rows of each rank, which all ranks begin together."""
    return play_ranks(GroupTasks.of(*kind, costs, group.among), group.rows.reshape(1, 1, -1))


def play_ranks(tasks: GroupTasks, factors: Floats) -> list[Played]:
    """[ranks] one cell that all ranks begin at time 0, as `schedc.cell.simulate.play` gives it.

    factors: [1, 1, ranks] rows of each rank over the mean.
    """
    sets = RankSets(factors.shape[2])
    times = np.reshape(task_times(tasks, factors, factors), (-1, sets.ranks))
    cell = play(tasks, sets, closed=False, behind=False)
    values = run(_alone(cell.instructions), np.zeros((1, sets.ranks)), times, sets=sets.table)
    return [_on_rank(cell, *row) for row in zip(values.T, times.T.tolist(), strict=True)]


def _on_rank(cell: PlayedCell, values: Floats, times: list[float]) -> Played:
    """The cell alone. values: [n] of its walk; times: [tasks]."""
    all_, spans, exposed, standing = cell.tasks.tasks.all, [], [], []
    for action, task, *around in cell.marks:
        clock, own, begin, end = values[around].tolist()
        if action is not Action.WAIT:
            spans.append(StepSpan(all_[task], begin, end))
            continue
        start = max(clock, own)  # before it, an earlier exchange of the queue is carried
        behind = start + float(blocked_at(*values[around])[1])
        exposed += [StepSpan(all_[task], clock, min(start, end)), StepSpan(all_[task], behind, end)]
        standing.append(StepSpan(all_[task], start, behind))
    complete = (cell.complete.get(half) for half in (Half.FORWARD, Half.BACKWARD))
    activation, gradient = (None if step is None else float(values[step]) for step in complete)
    some = (tuple(span for span in row if span.end > span.begin) for row in (exposed, standing))
    duration = float(values[cell.instructions.outs[0]])
    return Played(cell.tasks.tasks, tuple(times), tuple(spans), next(some), duration, activation, gradient, next(some))


def _alone(cell: CellInstructions) -> Walk:
    """The walk of a cell that begins at time 0, and whose messages are there. Rows are those of the cell."""
    first = np.cumsum([0, *(len(step.inputs) for step in cell.steps)], dtype=np.int32)
    inputs = np.array([each for step in cell.steps for each in step.inputs], np.int32).T
    op, add = np.array([step.op for step in cell.steps], np.int8), np.array([step.add for step in cell.steps], np.int32)
    return Walk(op, first, np.maximum(inputs[0], np.int32(-1)), inputs[1], add)
