"""Lower bounds of a cell over all of its programs, under many costs at once: its time, and its delays.

`OpBounds` has those of the ops of a cell. Two ops of a pair share queues, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedc.cell.graph import QUEUES
from schedc.cell.program import HALVES, MESSAGED
from schedc.cell.tasks import Tasks
from schedc.ir.arrays import Bools, Floats


def lower_bounds(tasks: Tasks, duration: Floats) -> Floats:
    """[K] lower bounds of the cell's time: the longest chain, or a queue's work with what precedes and follows it.

    duration: [tasks, K] in time units, as the bounds.
    """
    return _lower_bounds(tasks, duration, _chains(tasks, duration, np.zeros((len(tasks), 1)))[:, 0])


def lower_bound(tasks: Tasks, duration: Sequence[float]) -> float:
    """`lower_bounds` under one cost. duration: [tasks] in time units, as the bound."""
    return float(lower_bounds(tasks, np.array(duration, np.float64)[:, np.newaxis])[0])


def delay_bounds(tasks: Tasks, duration: Floats) -> Floats:
    """[3, 3, K] a lower bound of each of a cell's delays (`schedc.cell.delays`): chains of dependent tasks, and work.

    duration: [tasks, K] in time units, as the bounds.
    """
    reached = reached_from(tasks, duration)
    completing = (None, *tasks.leaving)
    end = end_bounds(tasks, duration, reached)
    bounds = np.stack([end if last is None else latest(reached[list(last)]) for last in completing])
    bounds[:, 0] = np.maximum(bounds[:, 0], 0.0)
    bounds[[last is None for last in completing], 0] = _lower_bounds(tasks, duration, reached[:, 0])
    return bounds


def reached_from(tasks: Tasks, duration: Floats) -> Floats:
    """[tasks, 3, K] the longest chain up to the end of each task: from any, and from those of halves with messages.

    duration: [tasks, K] in time units, as the chains; -inf where none leads there.
    """
    of_half = [[0.0 if task.half is half else -np.inf for task in tasks.all] for half in MESSAGED]
    return _chains(tasks, duration, np.array([[0.0] * len(tasks), *of_half]).T)


def end_bounds(tasks: Tasks, duration: Floats, reached: Floats) -> Floats:
    """[3, K] what the cell's end is behind its start, and behind the messages of its halves, at least.

    It is the longest chain, and behind a message the work of a queue for that half too. duration: [tasks, K] in time
    units, as the bounds. reached: `reached_from` of them.
    """
    end = latest(reached)
    for column, half in enumerate(MESSAGED, 1):
        waits = np.array([task.half is half for task in tasks.all], np.bool_)
        if waits.any():
            busy = busy_bounds(*queue_work(tasks, duration, reached[:, column], waits))
            np.maximum(end[column], busy, out=end[column])
    return end


def latest(reached: Floats) -> Floats:
    """[3, K] the longest of the chains of tasks; -inf without one."""
    return np.asarray(reached.max(axis=0, initial=-np.inf))


def _chains(tasks: Tasks, duration: Floats, start: Floats) -> Floats:
    """[tasks, starts, K] the longest chain up to the end of each task, from tasks with a start; -inf without one.

    start: [tasks, starts] when a chain may begin at a task, -inf where none does.
    """
    reached = np.empty((len(tasks), start.shape[1], duration.shape[1]))
    for index, task in enumerate(tasks.all):
        latest: Floats = start[index][:, np.newaxis]
        for before in task.after:
            latest = np.maximum(latest, reached[before])
        np.add(latest, duration[index], out=reached[index])
    return reached


def _lower_bounds(tasks: Tasks, duration: Floats, heads: Floats) -> Floats:
    """`lower_bounds`. heads: [tasks, K] the earliest end of each task."""
    chain = heads.max(axis=0, initial=0.0)
    return np.asarray(np.maximum(chain, busy_bounds(*queue_work(tasks, duration, heads))))


def queue_work(
    tasks: Tasks, duration: Floats, heads: Floats, counted: Bools | None = None
) -> tuple[Floats, Floats, Floats]:
    """[queues, K] the work of each queue, and the shortest chains in front of a task on it and behind one.

    The queues are those of `schedc.cell.graph.QUEUES`; chains are inf on those without work. duration: [tasks, K] in
    time units. heads: [tasks, K] the earliest end of each task. counted: [tasks] which tasks; None for all.
    """
    tails, queue_of = _tails(tasks, duration), np.array(tasks.queues, np.int64)
    work, before, behind = np.zeros((3, len(QUEUES), duration.shape[1]))
    before[:], behind[:] = np.inf, np.inf
    of = np.ones(len(tasks), np.bool_) if counted is None else counted
    for queue in np.unique(queue_of[of]):
        members = of & (queue_of == queue)
        time = duration[members]
        work[queue] = np.cumsum(time, axis=0)[-1]  # in order: `sum` may add in another one
        runs = time > 0
        before[queue] = np.where(runs, heads[members] - time, np.inf).min(axis=0)
        behind[queue] = np.where(runs, tails[members], np.inf).min(axis=0)
    return work, before, behind


def busy_bounds(work: Floats, before: Floats, behind: Floats) -> Floats:
    """[K] the longest work of a queue with what precedes and follows it. The arguments are those of `queue_work`."""
    whole = np.where(np.isfinite(before), before + work + behind, 0.0)
    return np.asarray(whole.max(axis=0, initial=0.0))


def _tails(tasks: Tasks, duration: Floats) -> Floats:
    """[tasks, K] the time of the longest chain behind each task."""
    tails = np.zeros_like(duration)
    for index in reversed(range(len(tasks))):
        for after in tasks.followers[index]:
            np.maximum(tails[index], tails[after] + duration[after], out=tails[index])
    return tails


@dataclass(frozen=True, eq=False)
class OpBounds:
    """What bounds cells with an op under K costs, whatever their programs.

    place: 0 for an op on the first graph of a cell, 1 on the second (`schedc.cell.program.HALVES`).
    end: [3, K] `end_bounds`. leaving: [3, K] the longest chain to the tasks that complete the op's
    message, from any task, and from tasks of halves with messages; -inf without. None without a message.
    work, before, behind: [queues, K] time of the op's tasks on a queue, the least chain in front of one, and behind.
    """

    place: int
    end: Floats
    leaving: Floats | None
    work: Floats
    before: Floats
    behind: Floats

    @classmethod
    def of(cls, tasks: Tasks, duration: Floats) -> OpBounds:
        """tasks: bounds of a cell of one op. duration: [tasks, K] in time units, as the bounds."""
        place = int(not HALVES[tasks.kind][0])
        reached = reached_from(tasks, duration)
        last = tasks.leaving[place]
        leaving = None if last is None else latest(reached[list(last)])
        return cls(place, end_bounds(tasks, duration, reached), leaving, *queue_work(tasks, duration, reached[:, 0]))


def delays_of(*ops: OpBounds) -> Floats:
    """[3, 3, K] lower bounds of the delays of the cell of one op or two, as `delay_bounds`."""
    end = np.maximum.reduce([op.end for op in ops])
    work = np.sum([op.work for op in ops], axis=0)
    before, behind = (np.minimum.reduce([getattr(op, name) for op in ops]) for name in ("before", "behind"))
    whole = np.maximum(np.maximum(end[0], 0.0), busy_bounds(work, before, behind))
    completed: list[Floats | None] = [None, None]
    for op in ops:
        if op.leaving is not None:
            completed[op.place] = op.leaving
    bounds = np.stack([end, *(end if leaving is None else leaving for leaving in completed)])
    bounds[:, 0] = np.maximum(bounds[:, 0], 0.0)
    bounds[[True, *(leaving is None for leaving in completed)], 0] = whole
    return np.asarray(bounds)
