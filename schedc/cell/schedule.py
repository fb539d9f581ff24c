"""Finds the order inside a cell: by list scheduling on a compute lane and the exchange lanes, or by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from schedc.cell.bounds import lower_bound
from schedc.cell.compiled_search import interpreted, list_runs
from schedc.cell.costs import CellCosts
from schedc.cell.graph import QUEUES, StageShape
from schedc.cell.host_lane import without_host
from schedc.cell.list_scheduler import MANNERS, LaneClock, Placed, Priority
from schedc.cell.local_search import BRIEF, Tried, improved, placed_in_order, varied
from schedc.cell.program import Action, CellProgram, CellStep, Half, PlanOrder
from schedc.cell.simulate import play_tasks
from schedc.cell.tasks import CellKey, Tasks, tasks_of
from schedc.cell.written_order import chooser
from schedc.diagnostics import Diagnostic, DiagnosticError, Label

MOST_PROGRAMS = 8192
"""Programs that are kept: by costs, and by the times that follow from them."""


@lru_cache(MOST_PROGRAMS)
def cell_program(
    kind: str,
    forward: StageShape | None,
    backward: StageShape | None,
    costs: CellCosts,
    order: PlanOrder | None = None,
    backward_costs: CellCosts | None = None,
    recomputed: tuple[int, ...] = (),
) -> CellProgram:
    """The program of a cell. Equal arguments give equal programs, so that all ranks of a group run the same one.

    kind: one of `KINDS`. forward, backward: the two graphs (`HALVES`); None for one on which the kind runs nothing. An
        R has the graph of the backward, whose own cell then has `StageShape.ready`.
    costs: costs of the forward's stage, and of the backward's stage unless ``backward_costs`` gives others.
    order: order by hand of an FB or FI. Without it the shortest of several list schedules is taken, and of equally
        short ones the one whose outputs are complete first. With copies of sizes to the host it is no longer than the
        order without them, in which each copy is waited for at once.
    recomputed: nodes of the backward's stage to recompute, in addition to those that its graph marks.

    Costs that give the cell the same times give the same program, which is then not searched again.
    Raises `DiagnosticError` (S323) for an order by hand that cannot run.
    """
    tasks = tasks_of(kind, forward, backward, recomputed)
    return _program(tasks.key, tasks.durations(costs, backward_costs or costs), order, BRIEF if costs.brief else 1.0)


def forget_programs() -> None:
    """Drops all kept programs, so that the next ones are searched anew."""
    cell_program.cache_clear()
    _program.cache_clear()


@lru_cache(MOST_PROGRAMS)
def _program(cell: CellKey, duration: tuple[float, ...], order: PlanOrder | None, effort: float) -> CellProgram:
    """`cell_program` under times of its tasks, [tasks]. effort: the share of a search."""
    tasks = tasks_of(*cell)
    if order is not None and len(tasks.kind) == 2:
        placed = _by_hand(tasks, duration, order)
        return _steps(tasks, placed)
    bare = without_host(tasks, duration)
    if bare is None:
        return _steps(tasks, _searched(tasks, duration, effort))
    asking = placed_in_order(tasks, duration, bare.order(_searched(bare.tasks, bare.duration, effort)))
    programs = _steps(tasks, _searched(tasks, duration, effort, asking)), _steps(tasks, asking)
    return min(programs, key=lambda program: play_tasks(program, tasks, duration).duration)


def _searched(tasks: Tasks, duration: tuple[float, ...], effort: float, *starts: Placed) -> Placed:
    """The best schedule of the search. effort: its share. starts: schedules to begin with."""
    bound = lower_bound(tasks, duration)
    rules = list(_rules(tasks, duration))
    with interpreted():
        tried = [Tried.of(tasks, placed, bound) for placed in map(list_runs(tasks, duration), rules)]
    merits = [each.merit for each in tried]
    more = varied(tasks, duration, rules[merits.index(min(merits))], bound, effort)
    return improved(tasks, duration, ([Tried.of(tasks, each, bound) for each in starts], tried, more), bound, effort)


def _rules(tasks: Tasks, duration: tuple[float, ...]) -> Iterator[Priority]:
    """Rules that prefer the longest path to the end, in several weightings of the tasks on it.

    Exchanges that weigh double help where a lane is scarce. A preferred half of a pair sends its output early.
    """
    total = sum(duration) or 1.0
    for weight in (1.0, 2.0):
        weighted = tuple(
            time * weight if task.exchange else time for task, time in zip(tasks.all, duration, strict=True)
        )
        path = tasks.longest_paths(weighted)
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
"""The preferred half of a pair, and its advantage as a share of the cell's time."""


def _by_hand(tasks: Tasks, duration: tuple[float, ...], order: PlanOrder) -> Placed:
    placed = LaneClock(tasks, duration).run(chooser(tasks, order))
    if len(placed) < len(tasks):
        ran = {index for index, _, _ in placed}
        stuck = [task.name for index, task in enumerate(tasks.all) if index not in ran]
        more = f", and {len(stuck) - 4} more" if len(stuck) > 4 else ""
        raise DiagnosticError([
            Diagnostic("S323", "the order of the cell deadlocks", Label(order.span, "this order"),
                       notes=(f"these wait for each other: {', '.join(stuck[:4])}{more}",),
                       help="let each part come after what it needs, or leave the order to `overlap auto`",
                       source=order.source)
        ])  # fmt: skip
    return placed


def _steps(tasks: Tasks, placed: Placed) -> CellProgram:
    """The steps of a schedule. Exchanges start once their inputs are there, in the order of their queues.

    Waits come right before the first use."""
    slot = _Slots(tasks, placed)
    steps: list[CellStep] = []
    done = [False] * len(tasks)

    def emit(action: Action, index: int) -> None:
        task = tasks.all[index]
        steps.append(CellStep(action, task.half, task.node))
        done[index] = action is not Action.START

    def settle(index: int) -> None:
        for before in sorted(tasks.all[index].after, key=slot.order.__getitem__):
            if not done[before]:
                emit(Action.WAIT, before)

    for number in range(len(slot.compute) + 1):
        for action, index in slot.exchanges[number]:
            if action is Action.START:
                settle(index)
            if not done[index]:
                emit(action, index)
        if number < len(slot.compute):
            settle(slot.compute[number])
            emit(Action.RUN, slot.compute[number])
    activation_at, gradient_at = (_complete(tasks, steps, wanted) for wanted in tasks.leaving)
    return CellProgram(tuple(steps), activation_at, gradient_at, tasks.kind)


class _Slots:
    """Places exchanges between segments: exchanges[i] come before the i-th segment, the last ones at the end."""

    def __init__(self, tasks: Tasks, placed: Placed) -> None:
        self.order = {index: number for number, (index, _, _) in enumerate(placed)}
        segments = [item for item in placed if not tasks.all[item[0]].exchange]
        self.compute = [index for index, _, _ in segments]
        self.begins = [begin for _, begin, _ in segments]
        self.exchanges: list[list[tuple[Action, int]]] = [[] for _ in range(len(self.compute) + 1)]
        free = {index: number + 1 for number, index in enumerate(self.compute)}  # the first slot behind each task
        last = [0] * len(QUEUES)
        for index, begin, end in placed:
            task = tasks.all[index]
            if not task.exchange:
                continue
            queue = tasks.queues[index]
            after = max([last[queue], *(free[before] for before in task.after)])
            if any(tasks.all[before].exchange for before in task.after):
                after = max(after, self._next(begin))
            last[queue] = free[index] = after
            self.exchanges[after].append((Action.START, index))
            if not tasks.followers[index]:
                self.exchanges[max(after, self._next(end))].append((Action.WAIT, index))

    def _next(self, time: float) -> int:
        """Number of the first segment that begins at ``time`` or later."""
        return next((number for number, begin in enumerate(self.begins) if begin >= time), len(self.begins))


def _complete(tasks: Tasks, steps: Sequence[CellStep], wanted: tuple[int, ...] | None) -> int:
    """Number of steps after which the ``wanted`` tasks are complete; -1 if the cell has no such tasks."""
    if wanted is None:
        return -1
    ends = {(tasks.all[index].half, tasks.all[index].node) for index in wanted}
    return max(
        (n for n, step in enumerate(steps, 1) if step.action is not Action.START and step[1:] in ends), default=0
    )
