"""One schedule as the page and the terminal show it: its times, memory, idle time and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from schedc.drawing.cells import CellColumns, cells_of
from schedc.drawing.facts import figures, origin_of, weighted
from schedc.drawing.markup import plain_markup
from schedc.ir.arrays import Int64
from schedc.ir.schedule import Schedule
from schedc.source import first_sentence
from schedc.step.bubbles import Bubbles, classify, classify_cells, classify_run, critical_path
from schedc.step.copy_runs import CopyRuns
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import Memory, measure_memory
from schedc.step.timeline import Timeline, simulate
from schedc.step.work_runs import WorkRuns
from schedc.units import equations


@dataclass(frozen=True, eq=False)
class Chart:
    """A schedule with its timeline, memory and classed idle time, under one set of costs or as a run measured them.

    p2p: time. Latency of a message by the costs; 0 for a run. said: further words of the title, as ``measured``.
    origin: (name, value) of a further figure that says where the times are from. measured: whether the times are those
    of a run, in ms. works: what moves beside the compute; copies: copies of experts inside cells; None without any.
    note: what the drawing leaves out; "" for nothing.
    """

    schedule: Schedule
    timeline: Timeline
    memory: Memory
    bubbles: Bubbles
    p2p: float
    said: str = ""
    origin: tuple[tuple[str, str], ...] = ()
    measured: bool = False
    works: WorkRuns | None = None
    copies: CopyRuns | None = None
    note: str = ""

    @classmethod
    def of(
        cls, schedule: Schedule, timeline: Timeline, memory: Memory, costs: Costs, works: WorkRuns | None = None
    ) -> Chart:
        """The chart of a timeline and a memory under these costs."""
        bubbles = classify(timeline, costs, works)
        return cls(schedule, timeline, memory, bubbles, float(costs.p2p), origin=origin_of(costs), works=works)

    @classmethod
    def inside(cls, schedule: Schedule, memory: Memory, costs: Costs, copies: CopyRuns) -> Chart:
        """The chart of a step that is priced from inside its cells, with the copies that travel there."""
        timeline, latency = copies.timeline, float(costs.p2p)
        bubbles = classify_cells(timeline, timeline.end - timeline.start, latency)
        return cls(schedule, timeline, memory, bubbles, latency, origin=origin_of(costs, inside=True), copies=copies)

    @classmethod
    def predicted(cls, schedule: Schedule, costs: Costs, dependencies: Dependencies | None = None) -> Chart:
        """The chart of a legal schedule under costs of its stages. Raises `DiagnosticError` (S404)."""
        dependencies = dependencies or Dependencies.of(schedule)
        timeline = simulate(schedule, costs, dependencies)
        return cls.of(schedule, timeline, measure_memory(schedule, costs, dependencies), costs)

    @classmethod
    def of_run(cls, schedule: Schedule, timeline: Timeline, memory: Memory) -> Chart:
        """The chart of a measured timeline; memory is what the order holds, in the costs' unit."""
        return cls(schedule, timeline, memory, classify_run(timeline), 0.0, measured=True)

    @cached_property
    def cells(self) -> CellColumns:
        return cells_of(self.schedule, self.timeline, self.memory, self.works, self.copies)

    @cached_property
    def critical(self) -> Int64:
        """[length] The cells of the critical path."""
        return critical_path(self.timeline)

    @property
    def title(self) -> str:
        """Name and sizes, on one line."""
        values = equations(self.schedule.sizes)
        named = f"{self.schedule.name} ({values})" if values else self.schedule.name
        return plain_markup(f"{named}, {self.said}" if self.said else named)

    @property
    def summary(self) -> str:
        """The first sentence of the documentation."""
        return first_sentence(plain_markup(self.schedule.doc))

    @property
    def weighted(self) -> bool:
        """Whether the costs give activations sizes, so that memory differs from the number of activations."""
        return weighted(self.memory)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """(name, value) of the figures by which schedules are compared."""
        return [*figures(self.schedule, self.timeline, self.memory).items(), *self.origin]


def longest(charts: Sequence[Chart]) -> float:
    """The longest makespan: the time that the common axis of the charts shows."""
    return max((chart.timeline.makespan for chart in charts), default=0.0)
