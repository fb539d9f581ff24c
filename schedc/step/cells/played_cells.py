"""Cell programs as instructions of a walk whose columns are the ranks of an expert group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from schedc.cell.graph import EXCHANGE_LANES, QUEUES, Lane
from schedc.cell.group import GroupTasks
from schedc.cell.program import Action, Edge, Half
from schedc.ir.arrays import Floats, Int32
from schedc.step.cells.step_copies import NO_TRAVELS, Travels
from schedc.step.lowering import FREE, GRADIENT, INPUT, CellInstruction, CellInstructions
from schedc.step.numba_kernels import MAX, MEET

Members = tuple[tuple[int, ...], ...] | None


@dataclass
class RankSets:
    """The ranks that exchange with each other, as rows for MEET: each has the number of a set for every rank."""

    ranks: int
    rows: dict[tuple[int, ...], int] = field(default_factory=dict)

    def row(self, members: Members) -> int:
        """The row of these groups of ranks; None: all are one. A rank of no group is alone."""
        first = dict.fromkeys(range(self.ranks), 0) if members is None else {m: g[0] for g in members for m in g}
        return self.rows.setdefault(tuple(first.get(rank, rank) for rank in range(self.ranks)), len(self.rows))

    @property
    def table(self) -> Int32:
        """[rows, ranks]"""
        return np.array(list(self.rows) or [(0,) * self.ranks], np.int32)


class Mark(NamedTuple):
    """A step of a cell program. clock: the rank's clock in front of it; own: when the rank has started the exchange.

    begin, end: of the segment or exchange. All are instructions.
    """

    action: Action
    task: int
    clock: int
    own: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class PlayedCell:
    """A cell program on all ranks of a group. Rows of adds are the tasks, and exchanges of copies behind them.

    marks: all steps, in order. complete: the instruction that completes the message of each half. lanes: [rows] that of
    each exchange in `EXCHANGE_LANES`; -1 for segments. out, back: by layer the rows of copies for the step.
    """

    tasks: GroupTasks
    instructions: CellInstructions
    marks: tuple[Mark, ...]
    complete: dict[Half, int]
    lanes: tuple[int, ...]
    out: dict[int, int]
    back: dict[int, int]
    _again: Callable[[Travels, Lane, Members], _Playing]

    def with_copies(self, travels: Travels, lane: Lane, members: Members) -> PlayedCell:
        """The same cell with exchanges of copies for the step, on a lane and among members."""
        return self._again(travels, lane, members).played()

    def spent(self, values: Floats, base: Int32, times: Floats, row: Int32) -> tuple[Floats, Floats]:
        """[cells, ranks] time of segments; [3, lanes, cells, ranks] times that lanes carry, are exposed and wait.

        values: [n, ranks] of the walk. base: [cells] first instruction of each. times: [rows, ranks] of tasks.
        row: [cells] of the first task of each. A rank waits until an exchange begins, and is exposed behind that.
        """
        compute = np.zeros((base.size, times.shape[1]))
        lanes = np.zeros((3, len(EXCHANGE_LANES), *compute.shape))
        for action, task, *around in self.marks:
            if action is Action.RUN:
                compute += times[row + task]
                continue
            carried, exposed, waited = lanes[:, self.lanes[task]]
            if action is Action.START:
                carried += times[row + task]
                continue
            blocked, waiting = blocked_at(*(values[base + step] for step in around))
            exposed += blocked - waiting
            waited += waiting
        return compute, lanes


def blocked_at(clock: Floats, own: Floats, begin: Floats, end: Floats) -> tuple[Floats, Floats]:
    """[n] how long a rank blocks at a WAIT, and how long until the exchange begins. Arguments: [n], as in `Mark`."""
    blocked = np.maximum(end - clock, 0.0)
    return blocked, np.clip(begin - np.maximum(clock, own), 0.0, blocked)


def play(tasks: GroupTasks, sets: RankSets, closed: bool, behind: bool) -> PlayedCell:
    """The instructions of a cell program.

    closed: the cell begins when all its messages are there, and sends at its end. behind: the gradient leaves no sooner
    than the output.
    """
    return _Playing(tasks, sets, closed, behind).played()


class _Playing:
    """A cell program step by step. clock: the instruction of the rank's clock; free: that of each queue's last end.

    Weights of copies leave as in the runtime: those of the first layer with the cell, those of a later one when the
    experts of the layer before have theirs. Gradients leave behind all steps, the last layer first, two at a time.
    """

    def __init__(
        self,
        tasks: GroupTasks,
        sets: RankSets,
        closed: bool,
        behind: bool,
        travels: Travels = NO_TRAVELS,
        lane: Lane = Lane.NODE,
        members: Members = None,
    ) -> None:
        self.tasks, self.sets, self.closed, self.behind = tasks, sets, closed, behind
        count, copies = len(tasks.tasks), travels.total
        self.out = {layer: count + number for number, layer in enumerate(travels.out)}
        self.back = {layer: count + len(self.out) + number for number, layer in enumerate(travels.back)}
        self.queues = (*tasks.tasks.queues, *[QUEUES.index(lane)] * copies)
        self.members = (*tasks.members, *[members] * copies)
        self.lanes = (
            *(EXCHANGE_LANES.index(task.lane) if task.exchange else -1 for task in tasks.tasks.all),
            *[EXCHANGE_LANES.index(lane)] * copies,
        )
        self.steps: list[CellInstruction] = []
        self.clock = self.put(*((FREE, INPUT, GRADIENT) if closed else (FREE,)))
        self.free: dict[int, int] = {}
        self.begun: dict[int, tuple[int, int, int]] = {}
        self.complete: dict[Half, int] = {}
        self.marks: list[Mark] = []

    def put(self, *inputs: int, op: int = MAX, add: int = -1) -> int:
        self.steps.append(CellInstruction(op, tuple((read, 0) for read in inputs), add))
        return len(self.steps) - 1

    def played(self) -> PlayedCell:
        task_of = self.tasks.tasks.number
        act = {Action.RUN: self.run, Action.START: self.start, Action.WAIT: self.wait}
        self.lend(0)
        for part in self.tasks.program.parts:
            if isinstance(part, Edge):
                self.meet_message(part)
            else:
                act[part.action](task_of[part.half, part.node])
        output, gradient = (self.complete.get(half, self.clock) for half in (Half.FORWARD, Half.BACKWARD))
        self.give_back()
        if self.closed:
            output = gradient = self.clock
        elif self.behind:
            gradient = self.put(output, gradient)
        instructions = CellInstructions(tuple(self.steps), (self.clock, output, gradient))
        again = partial(_Playing, self.tasks, self.sets, self.closed, self.behind)
        rows = self.lanes, self.out, self.back
        return PlayedCell(self.tasks, instructions, tuple(self.marks), self.complete, *rows, again)

    def meet_message(self, edge: Edge) -> None:
        if not edge.opens:
            self.complete[edge.half] = self.clock
        elif not self.closed:
            self.clock = self.put(self.clock, INPUT if edge.half is Half.FORWARD else GRADIENT)

    def lend(self, layer: int) -> None:
        """Start the weights of a layer's copies, if it has any."""
        if layer in self.out:
            self.start(self.out[layer])

    def borrow(self, task: int) -> None:
        """Wait in front of experts for the weights of their copies, and start those of the next layer."""
        half, node = self.tasks.tasks.all[task].half, self.tasks.tasks.all[task].node
        experts = self.tasks.tasks.shape(half).nodes[node]
        if not self.out or half is not Half.FORWARD or experts.role != "experts" or experts.slice:
            return
        if experts.layer in self.out:
            self.wait(self.out[experts.layer])
        self.lend(experts.layer + 1)

    def give_back(self) -> None:
        """The gradients of all layers' copies, to the end."""
        before = None
        for layer in sorted(self.back, reverse=True):
            self.start(self.back[layer])
            if before is not None:
                self.wait(before)
            before = self.back[layer]
        if before is not None:
            self.wait(before)

    def run(self, task: int) -> None:
        self.borrow(task)
        begin, self.clock = self.clock, self.put(self.clock, add=task)
        self.marks.append(Mark(Action.RUN, task, begin, begin, begin, self.clock))

    def start(self, task: int) -> None:
        queue = self.queues[task]
        own = self.put(self.clock, self.free[queue]) if queue in self.free else self.clock
        begin = self.put(own, op=MEET, add=self.sets.row(self.members[task]))
        self.free[queue] = self.put(begin, add=task)
        self.begun[task] = own, begin, self.free[queue]
        self.marks.append(Mark(Action.START, task, self.clock, *self.begun[task]))

    def wait(self, task: int) -> None:
        self.marks.append(Mark(Action.WAIT, task, self.clock, *self.begun[task]))
        self.clock = self.put(self.clock, self.begun[task][2])
