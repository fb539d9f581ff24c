"""The order inside a cell: list scheduling on a compute and two exchange lanes, or an order by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from schedc.cell.costs import CellCosts
from schedc.cell.graph import QUEUES, StageShape
from schedc.cell.list_scheduler import MANNERS, LaneClock, Placed, Priority
from schedc.cell.local_search import improved, lower_bound, merit, varied
from schedc.cell.predict import longest_paths
from schedc.cell.program import Action, CellProgram, Half, PlanOrder, Step
from schedc.cell.tasks import Tasks, tasks_of
from schedc.cell.written_order import chooser
from schedc.diagnostics import Diagnostic, DiagnosticError, Label


@lru_cache(maxsize=4096)
def cell_program(
    kind: str,
    forward: StageShape | None,
    backward: StageShape | None,
    costs: CellCosts,
    order: PlanOrder | None = None,
    backward_costs: CellCosts | None = None,
    recomputed: tuple[int, ...] = (),
) -> CellProgram:
    """The program of a cell; equal arguments give equal programs, so that all ranks of a group have the same.

    kind: one of `KINDS`. forward, backward: the graphs of the two stages; None for a half that the kind lacks. An R
        has that of the backward, whose own cell then has `StageShape.ready`.
    costs: of the forward's stage, and of the backward's where ``backward_costs`` says nothing else.
    order: by hand, for FB and FI; without it, of several list schedules the shortest, then the one whose outputs are
        complete first. Raises `DiagnosticError` (S323) for an order that cannot run.
    recomputed: nodes of the backward's stage to recompute, in addition to those that its graph marks.
    """
    tasks = tasks_of(kind, forward, backward, recomputed)
    back = backward_costs or costs
    duration = tasks.durations(costs, back)
    if order is not None and len(kind) == 2:
        placed = _by_hand(tasks, duration, order)
        return _steps(tasks, placed)
    bound = lower_bound(tasks, duration)
    rules = list(_rules(tasks, duration))
    tried = [LaneClock(tasks, duration).run(rule) for rule in rules]
    merits = [merit(tasks, placed, bound) for placed in tried]
    more = varied(tasks, duration, rules[merits.index(min(merits))], bound)
    return _steps(tasks, improved(tasks, duration, (tried, more), bound))


def serial_program(kind: str, forward: StageShape | None, backward: StageShape | None) -> CellProgram:
    """One half after the other, every exchange waited for at once: what a cell takes without overlap."""
    tasks = tasks_of(kind, forward, backward)
    steps = [
        Step(action, task.half, task.node)
        for task in tasks.all
        for action in ((Action.START, Action.WAIT) if task.exchange else (Action.RUN,))
    ]
    activation_at, gradient_at = (_complete(tasks, steps, wanted) for wanted in tasks.leaving)
    return CellProgram(tuple(steps), activation_at, gradient_at, kind)


def _rules(tasks: Tasks, duration: tuple[float, ...]) -> Iterator[Priority]:
    """Longest path to the end first, in several weightings of what lies on the path.

    Exchanges weigh more where a lane is scarce; a half of the pair that goes first sends its output early.
    """
    total = sum(duration) or 1.0
    for weight in (1.0, 2.0):
        weighted = tuple(
            time * weight if task.exchange else time for task, time in zip(tasks.all, duration, strict=True)
        )
        path = longest_paths(tasks, weighted)
        for half, share in _PREFERENCES if len(tasks.kind) == 2 else _PREFERENCES[:1]:
            gain = [share * total if task.half is half else 0.0 for task in tasks.all]
            for patience, courtesy in MANNERS:
                yield Priority([length + more for length, more in zip(path, gain, strict=True)], patience, courtesy)


_PREFERENCES = (
    (Half.FORWARD, 0.0),
    (Half.FORWARD, 0.1),
    (Half.FORWARD, 2.0),
    (Half.BACKWARD, 0.1),
    (Half.BACKWARD, 2.0),
)
"""Which half goes before the other, and by how much of the cell's time."""


def _by_hand(tasks: Tasks, duration: tuple[float, ...], order: PlanOrder) -> Placed:
    placed = LaneClock(tasks, duration).run(chooser(tasks, order))
    if len(placed) < len(tasks):
        ran = {at for at, _, _ in placed}
        stuck = [task.name for at, task in enumerate(tasks.all) if at not in ran]
        more = f", and {len(stuck) - 4} more" if len(stuck) > 4 else ""
        raise DiagnosticError([
            Diagnostic("S323", "the order of the cell comes to a standstill", Label(order.span, "this order"),
                       notes=(f"these wait for each other: {', '.join(stuck[:4])}{more}",),
                       help="let each part come after what it needs, or leave the order to `overlap auto`",
                       source=order.source)
        ])  # fmt: skip
    return placed


def _steps(tasks: Tasks, placed: Placed) -> CellProgram:
    """Starts as early as what they send is there, in the order of their lanes; waits right before the first use."""
    slot = _Slots(tasks, placed)
    steps: list[Step] = []
    done = [False] * len(tasks)

    def emit(action: Action, at: int) -> None:
        task = tasks.all[at]
        steps.append(Step(action, task.half, task.node))
        done[at] = action is not Action.START

    def settle(at: int) -> None:
        for before in sorted(tasks.all[at].after, key=slot.order.__getitem__):
            if not done[before]:
                emit(Action.WAIT, before)

    for number in range(len(slot.compute) + 1):
        for action, at in slot.exchanges[number]:
            if action is Action.START:
                settle(at)
            if not done[at]:
                emit(action, at)
        if number < len(slot.compute):
            settle(slot.compute[number])
            emit(Action.RUN, slot.compute[number])
    activation_at, gradient_at = (_complete(tasks, steps, wanted) for wanted in tasks.leaving)
    return CellProgram(tuple(steps), activation_at, gradient_at, tasks.kind)


class _Slots:
    """Where the exchanges go between the segments: exchanges[i] are before the i-th segment, the last at the end."""

    def __init__(self, tasks: Tasks, placed: Placed) -> None:
        self.order = {at: number for number, (at, _, _) in enumerate(placed)}
        segments = [item for item in placed if not tasks.all[item[0]].exchange]
        self.compute = [at for at, _, _ in segments]
        self.begins = [begin for _, begin, _ in segments]
        self.exchanges: list[list[tuple[Action, int]]] = [[] for _ in range(len(self.compute) + 1)]
        free = {at: number + 1 for number, at in enumerate(self.compute)}  # the first place behind each task
        last = [0] * len(QUEUES)
        for at, begin, end in placed:
            task = tasks.all[at]
            if not task.exchange:
                continue
            queue = tasks.queues[at]
            after = max([last[queue], *(free[before] for before in task.after)])
            if any(tasks.all[before].exchange for before in task.after):
                after = max(after, self._next(begin))
            last[queue] = free[at] = after
            self.exchanges[after].append((Action.START, at))
            if not tasks.followers[at]:
                self.exchanges[max(after, self._next(end))].append((Action.WAIT, at))

    def _next(self, time: float) -> int:
        """The first segment that begins then or later."""
        return next((number for number, begin in enumerate(self.begins) if begin >= time), len(self.begins))


def _complete(tasks: Tasks, steps: Sequence[Step], wanted: tuple[int, ...] | None) -> int:
    """After how many steps these tasks are complete; -1 where there is nothing to complete."""
    if wanted is None:
        return -1
    ends = {(tasks.all[at].half, tasks.all[at].node) for at in wanted}
    return max(
        (n for n, step in enumerate(steps, 1) if step.action is not Action.START and step[1:] in ends), default=0
    )
