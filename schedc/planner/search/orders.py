"""Orders of schedules at the sizes of plans, each made once: dependencies, peak counts, and what tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from schedc.compiler import price
from schedc.planner.price.priced import order_digest
from schedc.planner.search.cell_floors import CellFloors
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import ScheduleChoice
from schedc.step.dependencies import Dependencies
from schedc.step.peak_counts import PeakCounts


@dataclass(frozen=True, order=True)
class OrderKey:
    """What the order of a schedule depends on, where it does not follow the costs."""

    schedule: str
    pp: int
    microbatches: int
    vpp: int
    limit: int

    @classmethod
    def of(cls, axes: PlanAxes) -> OrderKey:
        return cls(axes.schedule, axes.pp, axes.microbatches, axes.vpp, axes.limit)


@dataclass(frozen=True, eq=False)
class KnownOrder:
    """A legal order, with the dependencies of its cells."""

    dependencies: Dependencies

    @cached_property
    def peaks(self) -> PeakCounts:
        return PeakCounts.of(self.dependencies)

    @cached_property
    def digest(self) -> bytes:
        """What tells the order from others: `schedc.planner.price.priced.order_digest`."""
        return order_digest(self.dependencies.schedule)


@dataclass(frozen=True, eq=False)
class Orders:
    """Orders that were made, and floors inside cells. choice: the schedule of a name."""

    choice: Callable[[str], ScheduleChoice]
    made: dict[OrderKey, KnownOrder] = field(default_factory=dict)
    floors: CellFloors = field(default_factory=CellFloors)

    def of(self, key: OrderKey) -> KnownOrder:
        """The order of a key. Raises `DiagnosticError` where the compiler finds it illegal."""
        if key not in self.made:
            choice = self.choice(key.schedule)
            sizes = choice.sizes(key.pp, key.microbatches, key.vpp, key.limit)
            assert sizes is not None
            self.made[key] = KnownOrder(price(choice.tree, sizes).dependencies)
        return self.made[key]
