"""One schedule as the page and the terminal show it: what it costs, holds and waits for, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from schedc.analysis.bubbles import Bubbles, classify, critical_path
from schedc.analysis.memory import Memory
from schedc.analysis.timeline import Timeline
from schedc.cost.costs import Costs
from schedc.draw.cells import Cells, cells_of
from schedc.draw.facts import figures, sizes, weighted
from schedc.draw.markup import plain
from schedc.ir.schedule import Int64, Schedule
from schedc.source import first_sentence


@dataclass(frozen=True, eq=False)
class Chart:
    """A schedule with its timeline, memory and classed idle time under one set of costs."""

    schedule: Schedule
    timeline: Timeline
    memory: Memory
    bubbles: Bubbles
    p2p: float

    @classmethod
    def of(cls, schedule: Schedule, timeline: Timeline, memory: Memory, costs: Costs) -> Chart:
        """The chart of a timeline and a memory that were made with these costs."""
        return cls(schedule, timeline, memory, classify(timeline, costs), float(costs.p2p))

    @cached_property
    def cells(self) -> Cells:
        return cells_of(self.schedule, self.timeline, self.memory)

    @cached_property
    def critical(self) -> Int64:
        return critical_path(self.timeline)

    @property
    def title(self) -> str:
        """Name and sizes, on one line."""
        given = sizes(self.schedule)
        return plain(f"{self.schedule.name} ({given})" if given else self.schedule.name)

    @property
    def summary(self) -> str:
        """The first sentence of the documentation."""
        return first_sentence(plain(self.schedule.doc))

    @property
    def weighted(self) -> bool:
        """Whether memory and the number of activations are two things."""
        return weighted(self.memory)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """(what, value) of the figures that two schedules are compared by."""
        return list(figures(self.schedule, self.timeline, self.memory).items())


def longest(charts: Sequence[Chart]) -> float:
    """The time that the common axis of some charts has to show."""
    return max((chart.timeline.makespan for chart in charts), default=0.0)
