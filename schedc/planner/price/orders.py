"""Orders of schedules at the sizes of plans, each made once: dependencies, peak counts and digests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

from schedc.compiler import price
from schedc.ir.schedule import Schedule
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
        """`order_digest` of the order."""
        return order_digest(self.dependencies.schedule)


@lru_cache(maxsize=512)
def known_order(choice: ScheduleChoice, key: OrderKey) -> KnownOrder:
    """The order of a schedule that does not follow the costs. Raises `DiagnosticError` for refused sizes."""
    sizes = choice.sizes(key.pp, key.microbatches, key.vpp, key.limit)
    assert sizes is not None, f"{key.schedule} has no sizes for {key}"
    return KnownOrder(price(choice.tree, sizes).dependencies)


def order_digest(schedule: Schedule) -> bytes:
    """Equal for equal orders on equal places, whatever the schedule is called."""
    columns = (schedule.rank_start, schedule.kind, schedule.stage, schedule.microbatch, schedule.pair)
    text = hashlib.blake2b(schedule.placement.rank_of_stage.tobytes(), digest_size=16)
    for column in columns:
        text.update(column.tobytes())
    return text.digest()
