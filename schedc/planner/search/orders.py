"""Orders of a search, and floors inside cells, each made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from schedc.planner.price.orders import KnownOrder, OrderKey, known_order
from schedc.planner.search.cell_floors import CellFloors
from schedc.planner.space.schedules import ScheduleChoice


@dataclass(frozen=True, eq=False)
class Orders:
    """Orders that were made, and floors inside cells. choice: the schedule of a name."""

    choice: Callable[[str], ScheduleChoice]
    made: dict[OrderKey, KnownOrder] = field(default_factory=dict)
    floors: CellFloors = field(default_factory=CellFloors)

    def of(self, key: OrderKey) -> KnownOrder:
        """The order of a key. Raises `DiagnosticError` where the compiler finds it illegal."""
        if key not in self.made:
            self.made[key] = known_order(self.choice(key.schedule), key)
        return self.made[key]
