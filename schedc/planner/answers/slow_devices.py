"""The step of a plan when devices are slow, at their worst places, and without the nodes of these devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np

from schedc.cell.delays import program_delays
from schedc.diagnostics import DiagnosticError, RequestError
from schedc.ir.arrays import Floats, Int64
from schedc.planner.cluster.read import with_devices
from schedc.planner.price.priced import PricedPlan, inside_of, order_of
from schedc.planner.price.stage_columns import StageColumns
from schedc.planner.search.best_first import SearchOptions, search
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.conditions import PlanCondition, read_condition
from schedc.planner.space.space import PlanSpace
from schedc.step.dependencies import Dependencies
from schedc.step.messages import simulate_messages
from schedc.step.timeline import durations, observed, run_durations

_PLACEMENTS = 200
"""Up to so many placements of slow devices are all tried."""


class SlowStep(NamedTuple):
    """A step of a plan with slow devices.

    step_s: seconds, at the worst places. ranks: pipeline ranks of the slow devices there. all_tried: whether every
    placement was tried; without, ``step_s`` is a lower bound of the worst. without: the plan without the nodes of
    these devices; None where no number of replicas makes one.
    """

    step_s: float
    ranks: tuple[int, ...]
    all_tried: bool
    without: SmallerPlan | None


class SmallerPlan(NamedTuple):
    """The same plan with fewer replicas. devices: that it uses. step_s: seconds for the same batch."""

    devices: int
    dp: int
    step_s: float


@dataclass(frozen=True, eq=False)
class SlowDevices:
    """Devices that are slow, in a cluster whose plans are those of a space.

    factor: how many times as long each op takes on a slow device. devices: slow ones, on different pipeline ranks.
    """

    factor: float
    devices: int
    space: PlanSpace

    def step(self, plan: PricedPlan) -> SlowStep:
        """The step with the slow devices at their worst places, and without their nodes.

        Exchanges inside of ops take as much longer as compute, because all ranks of a group wait for each other.
        Messages between pipeline ranks do not. The optimizer ends when the slow devices end.
        """
        cells = PacedCells.of(plan)
        pipeline, ranks, all_tried = self._worst(cells)
        columns = StageColumns.of_plans([plan.planned])
        beside = columns.beside(np.array([[pipeline]]))
        step = float(np.asarray(beside.step_of(pipeline) + (self.factor - 1) * beside.optimizer).item())
        return SlowStep(step, ranks, all_tried, self.without_nodes(plan))

    def _worst(self, cells: PacedCells) -> tuple[float, tuple[int, ...], bool]:
        """Seconds of the slowest pipeline, the ranks that are slow there, and whether all placements were tried."""
        ranks, slow = cells.dependencies.schedule.ranks, min(self.devices, cells.dependencies.schedule.ranks)

        def seconds(placed: tuple[int, ...]) -> float:
            pace = np.ones(ranks)
            pace[list(placed)] = self.factor
            return cells.seconds(pace)

        if comb(ranks, slow) <= _PLACEMENTS:
            worst = max(combinations(range(ranks), slow), key=seconds)
            return seconds(worst), worst, True
        placed: tuple[int, ...] = ()
        while len(placed) < slow:  # the rank whose slowness costs most on top
            others = [rank for rank in range(ranks) if rank not in placed]
            placed = max(((*placed, rank) for rank in others), key=seconds)
        return seconds(placed), tuple(sorted(placed)), False

    def without_nodes(self, plan: PricedPlan) -> SmallerPlan | None:
        """The plan with the most replicas that the other nodes have room for; None where none is legal and fits."""
        problem, axes = plan.planned.problem, plan.planned.axes
        left = problem.cluster.devices - self.devices * problem.cluster.per_node
        for dp in _replicas(axes, left // (axes.tp * axes.cp * axes.pp)):
            devices = axes.tp * axes.cp * axes.pp * dp
            try:
                cluster = with_devices(problem.cluster, devices)
                own = replace(self.space, cluster=cluster, conditions=same_plan(axes, dp, self.space), _orders={})
                found = search(own, replace(problem, cluster=cluster), SearchOptions(top=1))
            except (RequestError, DiagnosticError):
                continue
            if found.plans:
                return SmallerPlan(devices, dp, found.plans[0].step_s)
        return None


def _replicas(axes: PlanAxes, most: int) -> Iterator[int]:
    """Numbers of replicas, at most so many, that share the batch of a plan evenly; the largest first."""
    return (dp for dp in range(most, 0, -1) if axes.batch % (dp * axes.microbatch) == 0)


def same_plan(axes: PlanAxes, dp: int, space: PlanSpace) -> tuple[PlanCondition, ...]:
    """Conditions that only the same plan with so many replicas meets, wherever its devices lie."""
    values = {each.name: getattr(axes, each.name) for each in fields(axes)} | {"dp": dp}
    del values["microbatches"], values["spare"]
    texts = (f"{name} == {int(value) if isinstance(value, bool) else value}" for name, value in values.items())
    return tuple(read_condition(text, schedules=space.offered.names) for text in texts)


@dataclass(frozen=True, eq=False)
class PacedCells:
    """The cells of a pipeline, to run with a pace for each rank.

    kind: [cells] index into the next two. duration: [kinds] seconds; delay: [kinds, 3, 3] as for `simulate_messages`,
    None where messages leave at the ends of cells. latency: of a message. free: whether steps follow without a wait.
    """

    dependencies: Dependencies
    kind: Int64
    duration: Floats
    delay: Floats | None
    latency: float
    free: bool

    @classmethod
    def of(cls, plan: PricedPlan) -> PacedCells:
        """The cells of a plan, as `schedc.planner.price.priced.pipeline_of` has them."""
        planned, dependencies = plan.planned, order_of(plan.planned).dependencies
        free = planned.problem.stack.free_steps
        if not planned.axes.overlap:
            costs = StageColumns.of_plans([planned]).costs().resolved(dependencies.schedule.stages)
            duration = durations(dependencies, costs)
            return cls(dependencies, np.arange(duration.size), duration, None, costs.p2p, free)
        pricing = inside_of(planned, dependencies)
        programs = ((replace(of.program, opens_late=True), of) for of in pricing.kinds)
        delays = [program_delays(program, of.forward, of.backward, pricing.costs) for program, of in programs]
        duration = np.array([of.prediction.duration for of in pricing.kinds])
        return cls(dependencies, pricing.kind, duration, np.array(delays).reshape(-1, 3, 3), pricing.p2p, free)

    def seconds(self, pace: Floats) -> float:
        """Seconds of the pipeline. pace: [P] by rank, 1.2 where each cell takes 1.2 times as long."""
        rank = self.dependencies.rank
        if self.delay is None:
            times = run_durations(self.dependencies, self.duration * pace[rank], self.latency)
            line = observed(self.dependencies, *times, self.latency)
        else:
            kind = self.kind + self.duration.size * rank.astype(np.int64)
            duration = (pace[:, None] * self.duration).ravel()
            delay = (pace[:, None, None, None] * self.delay).reshape(-1, 3, 3)
            line = simulate_messages(self.dependencies, kind, duration, delay, self.latency).timeline
        return float(line.span.max()) if self.free else line.makespan
