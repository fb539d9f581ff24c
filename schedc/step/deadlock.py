"""Deadlock: ranks that wait for each other in a circle, shown as the shortest such circle.

Why a circle among the cells is the whole question. A Program sends every message as soon as it is computed and
waits for it only where it is needed. All its messages are taken from one global order of the cells, in which each
cell comes after everything that it waits for. Both ends of every channel post their messages in that order.

* Cells in a circle can never run, whatever carries the messages: each waits, through the order of its rank or
  through a message, for itself.
* Without a circle nothing gets stuck, even where a send is complete only when its receive is posted (rendezvous).
  Messages need no tag either: the k-th receive of a channel takes the k-th send. Take the first cell of the global
  order that does not run. All earlier cells have run, so the rank has reached the cell, and all messages for the cell
  were sent. Both ends posted them in the global order, behind earlier messages of their channels. So each met its own
  counterpart, and is complete. Then the cell runs: a contradiction. A wait for a send ends for the same reason.

So the order of compute alone decides, and one walk over it (`Levels`) finds the ranks that block.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from schedc.diagnostics import Diagnostic, Label
from schedc.ir.schedule import Schedule
from schedc.source import NOWHERE
from schedc.step.dependencies import Dependencies
from schedc.units import equations


@dataclass(frozen=True)
class WaitFor:
    """One step of a circle: ``rank`` blocks at its op ``at`` and waits for the op ``needs`` of another rank.

    at, needs: rows of the schedule. The next step is of the rank that holds ``needs``, which stands at an
    op before it.
    """

    rank: int
    at: int
    needs: int


def find_cycle(dependencies: Dependencies) -> tuple[WaitFor, ...]:
    """The shortest circle of waits among the ops at which ranks block for ever; empty without a deadlock.

    Among circles of one length, the circle through the lowest rank is given, from this rank on.
    """
    rank_at = {int(dependencies.rank[cell]): int(cell) for cell in dependencies.levels.stuck}
    waits = {rank: _waits(dependencies, rank, cell) for rank, cell in rank_at.items()}
    cycles = [cycle for rank in sorted(waits) if (cycle := _cycle_through(rank, waits, dependencies.schedule))]
    return min(cycles, key=len, default=())


def deadlock_diagnostics(dependencies: Dependencies) -> list[Diagnostic]:
    """S301 with the shortest circle as a trail, if there is a deadlock; else nothing."""
    cycle = find_cycle(dependencies)
    if not cycle:
        return []
    schedule = dependencies.schedule
    ranks = ", ".join(str(wait.rank) for wait in cycle)
    message = (
        f"deadlock: {f'ranks {ranks} wait for each other' if len(cycle) > 1 else f'rank {ranks} waits for itself'}"
    )
    labels = _labels(schedule, cycle)
    trail = [f"{'' if i == 0 else '<- '}{_step(schedule, wait)}" for i, wait in enumerate(cycle)]
    notes = (*trail, f"<- rank {cycle[0].rank}, at {equations(schedule.sizes)}")
    last, first = cycle[-1], cycle[0]
    help = (
        f"on rank {first.rank}, {_op(schedule, last.needs)} comes after {_op(schedule, first.at)}: "
        f"run it before, or delay {_op(schedule, last.at)} on rank {last.rank}"
    )
    return [Diagnostic("S301", message, labels[0], labels[1:], notes, help, source=schedule.source)]


def _waits(dependencies: Dependencies, rank: int, cell: int) -> tuple[WaitFor, ...]:
    """What holds a rank up at a cell: the producers that have not run and never will."""
    level = dependencies.levels.of
    waits = []
    for row, producer in enumerate(dependencies.producers[:, cell].tolist()):
        if producer >= 0 and level[producer] < 0:
            of_rows = dependencies.backward if row == 1 else dependencies.first  # a forward is the first op of its cell
            waits.append(WaitFor(rank, int(of_rows[cell]), int(of_rows[producer])))
    return tuple(waits)


def _cycle_through(rank: int, waits: dict[int, tuple[WaitFor, ...]], schedule: Schedule) -> tuple[WaitFor, ...]:
    """The shortest way from a rank back to itself along waits, breadth first; empty if there is none."""
    came: dict[int, WaitFor] = {}
    queue = deque([rank])
    while queue:
        current = queue.popleft()
        for wait in waits[current]:
            target = int(schedule.rank[wait.needs])
            if target == rank:
                return _path(came, rank, wait)
            if target not in came:
                came[target] = wait
                queue.append(target)
    return ()


def _path(came: dict[int, WaitFor], start: int, last: WaitFor) -> tuple[WaitFor, ...]:
    path = [last]
    while path[-1].rank != start:
        path.append(came[path[-1].rank])
    return tuple(reversed(path))


def _labels(schedule: Schedule, cycle: tuple[WaitFor, ...]) -> tuple[Label, ...]:
    """One label per source place: many steps may come from one line of a rank block."""
    said: dict[object, list[str]] = {}
    for wait in cycle:
        span = schedule.spans[schedule.span[wait.at]]
        said.setdefault(span, []).append(f"rank {wait.rank} stands here")
    return tuple(Label(span, ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")) for span, texts in said.items())  # type: ignore[arg-type]


def _step(schedule: Schedule, wait: WaitFor) -> str:
    other = schedule.rank[wait.needs]
    return (
        f"rank {wait.rank} at {_op(schedule, wait.at)}{_place(schedule, wait.at)} waits for "
        f"{_op(schedule, wait.needs)} of rank {other}{_place(schedule, wait.needs)}"
    )


def _op(schedule: Schedule, row: int) -> str:
    return str(schedule.op(row))


def _place(schedule: Schedule, row: int) -> str:
    op = schedule.op(row)
    parts = [f"line {op.span}"] * (op.span != NOWHERE) + [f"phase {op.phase}"] * bool(op.phase)
    return f" ({', '.join(parts)})" if parts else ""
