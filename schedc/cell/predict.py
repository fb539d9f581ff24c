"""What a cell program takes: its duration, what of its communication is hidden, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from schedc.cell.costs import CellCosts
from schedc.cell.graph import EXCHANGE_LANES, QUEUES, Lane, StageShape
from schedc.cell.program import Action, CellProgram, Half
from schedc.cell.tasks import Tasks, tasks_of

_ROUNDING = 1e-9


@dataclass(frozen=True)
class LaneUse:
    """busy: time that the lane carries exchanges; exposed: time that compute stands and waits for one of them."""

    busy: float
    exposed: float

    @property
    def hidden(self) -> float:
        return self.busy - self.exposed


@dataclass(frozen=True)
class Prediction:
    """Times of one cell, in the unit of its costs, from its start.

    compute: time of its segments; duration is that and all that is exposed.
    lanes: rail and node. activation_at, gradient_at: when the forward's outputs and the gradients of the backward's
    inputs are complete, and may be sent; None where there are none.
    chain: the longest chain of segments and exchanges that need each other; no order is shorter.
    """

    duration: float
    compute: float
    lanes: tuple[LaneUse, LaneUse]
    activation_at: float | None
    gradient_at: float | None
    chain: float

    @property
    def communication(self) -> float:
        return sum(lane.busy for lane in self.lanes)

    @property
    def exposed(self) -> float:
        return sum(lane.exposed for lane in self.lanes)

    @property
    def hidden(self) -> float:
        """The share of the communication that is hidden; 1 where there is none."""
        return hidden_share(self.communication, self.exposed)

    @property
    def bound(self) -> str:
        """What keeps the cell from being shorter: ``compute``, a lane, or ``chain``."""
        if self.exposed <= _ROUNDING * self.duration:
            return Lane.COMPUTE.value
        limits = {"chain": self.chain}
        limits |= {lane.value: use.busy for lane, use in zip(EXCHANGE_LANES, self.lanes, strict=True)}
        limits[Lane.COMPUTE.value] = self.compute
        return max(limits, key=lambda name: limits[name])


def hidden_share(communication: float, exposed: float) -> float:
    """1 - exposed / communication; 1 where nothing is communicated."""
    return 1.0 - exposed / communication if communication else 1.0


def predict(
    program: CellProgram,
    forward: StageShape | None,
    backward: StageShape | None,
    costs: CellCosts,
    backward_costs: CellCosts | None = None,
) -> Prediction:
    """Runs a cell program on paper, step by step.

    Compute runs the segments in order. An exchange begins when compute has come to its start and its queue is free of
    the ones started before it; at a wait compute stands until its end. ``backward_costs``: of the backward's stage,
    where they are not those of the forward's.
    """
    back = backward_costs or costs
    again = {step.node for step in program.steps if step.half is Half.AGAIN}
    tasks = tasks_of(program.kind, forward, backward, again)
    duration = tasks.durations(costs, back)
    of = {(task.half, task.node): at for at, task in enumerate(tasks.all)}
    clock, compute = 0.0, 0.0
    free = [0.0] * len(QUEUES)
    busy, exposed = dict.fromkeys(EXCHANGE_LANES, 0.0), dict.fromkeys(EXCHANGE_LANES, 0.0)
    ends: dict[int, float] = {}
    marks = {program.activation_at: 0.0, program.gradient_at: 0.0}
    for number, (action, half, node) in enumerate(program.steps, start=1):
        at = of[half, node]
        lane, queue = tasks.all[at].lane, tasks.queues[at]
        if action is Action.RUN:
            clock += duration[at]
            compute += duration[at]
        elif action is Action.START:
            ends[at] = free[queue] = max(clock, free[queue]) + duration[at]
            busy[lane] += duration[at]
        elif ends[at] > clock:
            exposed[lane] += ends[at] - clock
            clock = ends[at]
        if number in marks:
            marks[number] = clock
    rail, node_lane = (LaneUse(busy[lane], exposed[lane]) for lane in EXCHANGE_LANES)
    return Prediction(
        duration=clock,
        compute=compute,
        lanes=(rail, node_lane),
        activation_at=None if program.activation_at < 0 else marks[program.activation_at],
        gradient_at=None if program.gradient_at < 0 else marks[program.gradient_at],
        chain=max(longest_paths(tasks, duration), default=0.0),
    )


def longest_paths(tasks: Tasks, duration: tuple[float, ...]) -> tuple[float, ...]:
    """[tasks] time of the longest chain from the start of each task to the end of the cell."""
    path = [0.0] * len(tasks)
    for at in reversed(range(len(tasks))):
        path[at] = duration[at] + max((path[follower] for follower in tasks.followers[at]), default=0.0)
    return tuple(path)
