"""One schedule as the page and the terminal show it: what it costs, holds and waits for, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from schedc.analysis.bubbles import Bubbles, classify, critical_path
from schedc.analysis.memory import Memory
from schedc.analysis.timeline import Timeline
from schedc.cost.costs import Costs
from schedc.draw.cells import Cells, cells_of
from schedc.draw.markup import plain, quantity
from schedc.ir.schedule import Int64, Schedule


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
        sizes = ", ".join(f"{name} = {value}" for name, value in self.schedule.sizes.items())
        return plain(f"{self.schedule.name} ({sizes})" if sizes else self.schedule.name)

    @property
    def summary(self) -> str:
        """The first sentence of the documentation."""
        head, stop, _ = plain(self.schedule.doc).partition(". ")
        return head + stop.strip()

    @property
    def weighted(self) -> bool:
        """Whether the costs give activations a size, so that memory and their number are two things."""
        return not np.array_equal(self.memory.memory_inside, self.memory.activations_inside)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """(what, value) of the figures that two schedules are compared by."""
        timeline, memory, schedule = self.timeline, self.memory, self.schedule
        facts = [
            ("ranks", str(schedule.ranks)),
            ("stages", str(schedule.stages) + (f" in {p} pipes" if (p := schedule.placement.pipes) > 1 else "")),
            ("microbatches", str(schedule.microbatches)),
            ("ops", str(len(schedule))),
            ("makespan", quantity(timeline.makespan)),
            ("bubble per rank", _range(timeline.bubble)),
            ("bubble ratio", f"{100 * timeline.bubble_ratio:.1f} %"),
            ("span bubble ratio", f"{100 * timeline.span_bubble_ratio:.1f} %"),
            ("peak activations", _range(memory.peak_activations)),
        ]
        return facts + ([("peak memory", _range(memory.peak_memory))] if self.weighted else [])


def longest(charts: Sequence[Chart]) -> float:
    """The time that the common axis of some charts has to show."""
    return max((chart.timeline.makespan for chart in charts), default=0.0)


def _range(values: npt.NDArray[Any]) -> str:
    low, high = quantity(float(values.min())), quantity(float(values.max()))
    return low if low == high else f"{low} to {high}"
