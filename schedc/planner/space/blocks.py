"""Plans in blocks: a grid of outer axes, those of prefixes, and of inner axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from schedc.ir.arrays import Bools, Int64
from schedc.planner.space.axes import PlanAxes, Prefix

if TYPE_CHECKING:
    from schedc.planner.space.schedules import ScheduleChoice


class OrderOption(NamedTuple):
    """A schedule with its limit, and whether its pairs overlap."""

    choice: ScheduleChoice
    limit: int
    overlap: bool


@dataclass(frozen=True)
class InnerAxes:
    """The values of the inner axes of a block. levels: level of recomputation, and place."""

    orders: tuple[OrderOption, ...]
    levels: tuple[tuple[str, str], ...]
    layouts: tuple[str, ...]
    methods: tuple[str, ...]
    zeros: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return len(self.orders), len(self.levels), len(self.layouts), len(self.methods), len(self.zeros)

    def columns(self) -> dict[str, Any]:
        """The inner axes by name, as arrays that broadcast over a block."""

        def along(place: int, values: list[Any]) -> Any:
            return np.array(values).reshape([-1 if axis == place + 1 else 1 for axis in range(6)])

        return {
            "schedule": along(0, [order.choice.name for order in self.orders]),
            "limit": along(0, [order.limit for order in self.orders]),
            "overlap": along(0, [order.overlap for order in self.orders]),
            "recompute": along(1, [level for level, _ in self.levels]),
            "where": along(1, [where for _, where in self.levels]),
            "layout": along(2, list(self.layouts)),
            "alltoall": along(3, list(self.methods)),
            "zero": along(4, list(self.zeros)),
        }


@dataclass(frozen=True, eq=False)
class PlanBlock:
    """Plans whose prefixes have the same pp and vpp, and all experts on one rank or none.

    legal: [prefixes, orders, levels, layouts, methods, zeros] the plans of the grid that are legal.
    """

    prefixes: tuple[Prefix, ...]
    inner: InnerAxes
    legal: Bools

    def __len__(self) -> int:
        return int(np.count_nonzero(self.legal))

    @property
    def pp(self) -> int:
        return self.prefixes[0].pp

    @property
    def vpp(self) -> int:
        return self.prefixes[0].vpp

    def column(self, name: str) -> Int64:
        """[prefixes] an outer axis."""
        return np.array([getattr(prefix, name) for prefix in self.prefixes], np.int64)

    def axes(self, number: int) -> PlanAxes:
        """The plan at a flat index of the grid."""
        places = (int(each) for each in np.unravel_index(number, self.legal.shape))
        outer, order, level, layout, method, zero = places
        option, (recompute, where) = self.inner.orders[order], self.inner.levels[level]
        return PlanAxes(
            **vars(self.prefixes[outer]) | {"zero": self.inner.zeros[zero]},
            schedule=option.choice.name,
            limit=option.limit,
            recompute=recompute,
            where=where,
            layout=self.inner.layouts[layout],
            alltoall=self.inner.methods[method],
            overlap=option.overlap,
        )

    def numbers(self) -> Int64:
        """[plans] the flat indexes of the legal plans."""
        return np.flatnonzero(self.legal)
