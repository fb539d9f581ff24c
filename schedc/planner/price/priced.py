"""Prices a plan as the compiler prices its files: its makespan, what its ranks hold, and what stands beside both."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.ir.schedule import Schedule
from schedc.load.library import Text
from schedc.plan.layout.compare import load_per_rank
from schedc.plan.layout.parts import WORK
from schedc.plan.passes import Step, lower
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.rank_loads import rank_loads
from schedc.planner.price.states import OutsidePipeline, RankLoads, gathered_bytes, outside_pipeline
from schedc.source import Source
from schedc.step.costs.costs import parse_costs

_ANY = 1e18
"""Bytes of a memory that no plan fills."""


@dataclass(frozen=True, eq=False)
class PricedPlan:
    """A plan with its files, priced.

    makespan: seconds of the pipeline, as `schedc check` says it of the files: from inside cells where exchanges run
    beside compute. beside: seconds of a step beside it. peaks: [P] bytes of each rank at its peak, parameters
    included. reserve: bytes that no order counts. usable: bytes of a device. digest: of the order (`order_digest`).
    """

    planned: PlannedStep
    plan_text: str
    cost_text: str
    makespan: float
    beside: OutsidePipeline
    peaks: tuple[float, ...]
    reserve: float
    usable: float
    digest: bytes

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.makespan + float(self.beside.gradients) + float(self.beside.optimizer) + self.beside.step

    @property
    def fits(self) -> bool:
        return max(self.peaks) + self.reserve <= self.usable * (1 + 1e-12)


def price_plan(planned: PlannedStep, name: str = "planned", notes: tuple[str, ...] = ()) -> PricedPlan:
    """The plan through the compiler. Raises `DiagnosticError` where its schedule refuses its sizes."""
    fitting = price_fitting(planned, name, notes)
    return fitting or _priced(planned, planned.plan_file(name, _ANY, notes), name)


def price_fitting(planned: PlannedStep, name: str = "planned", notes: tuple[str, ...] = ()) -> PricedPlan | None:
    """The plan through the compiler, None where the compiler refuses its files for their memory. Raises as above."""
    memory = max(planned.problem.cluster.device.usable_bytes - _reserve(planned), 1.0)
    try:
        return _priced(planned, planned.plan_file(name, memory, notes), name)
    except DiagnosticError as error:
        if any(finding.code != "S406" for finding in error.diagnostics):
            raise
        return None


def _priced(planned: PlannedStep, text: str, name: str) -> PricedPlan:
    """The plan of a plan file."""
    usable, costs = planned.problem.cluster.device.usable_bytes, planned.cost_file()
    result = _read(name, text, costs)
    digest, reserve = order_digest(result.schedule), _reserve(planned)
    makespan, peaks = result.predicted.makespan, tuple(result.memory.peak_memory.tolist())
    return PricedPlan(planned, text, costs, makespan, _beside(planned, makespan), peaks, reserve, usable, digest)


def _reserve(planned: PlannedStep) -> float:
    buffers = planned.table.reserve[planned.row, int(planned.levels.max()), int(planned.axes.overlap)]
    return float(buffers + gathered_bytes(planned.problem.model, planned.axes, planned.placement.stages == 1))


def order_digest(schedule: Schedule) -> bytes:
    """Equal for equal orders on equal places, whatever the schedule is called."""
    columns = (schedule.rank_start, schedule.kind, schedule.stage, schedule.microbatch, schedule.pair)
    text = hashlib.blake2b(schedule.placement.rank_of_stage.tobytes(), digest_size=16)
    for column in columns:
        text.update(column.tobytes())
    return text.digest()


def pipeline_of(planned: PlannedStep) -> tuple[float, float]:
    """Seconds that the busiest rank computes and exchanges rows, and seconds of the pipeline."""
    timeline = read_back(planned).predicted
    return float(timeline.busy.max()), timeline.makespan


def read_back(planned: PlannedStep) -> Step:
    """The files of a plan through the compiler, with memory for any peak."""
    return _read("planned", planned.plan_file("planned", _ANY), planned.cost_file())


def _read(name: str, plan: str, costs: str) -> Step:
    tree = open_input(Text(Source(f"{name}.sched", plan), name))
    return lower(Step(tree, {}, parse_costs(Source(f"{name}.costs.toml", costs))), "predicted", "memory")


def _beside(planned: PlannedStep, makespan: float) -> OutsidePipeline:
    placement, parts = planned.placement, planned.layout.counts[:, : len(WORK)].astype(np.float64)
    counts = np.stack([load_per_rank(placement, column) for column in parts.T], axis=1)
    loads = rank_loads(planned.table, np.array([planned.row]), counts, placement.stages)
    one = RankLoads(loads.own, loads.experts, loads.backward[0], loads.late[:, 0], loads.busy[:, 0])
    return outside_pipeline(planned.problem, planned.axes, one, planned.axes.microbatches, makespan)
