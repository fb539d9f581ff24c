"""Plans in blocks: all plans that share the outer axes, as a grid over the inner ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from schedc.ir.arrays import Bools
from schedc.planner.space.axes import PlanAxes
from schedc.planner.space.schedules import ScheduleChoice


@dataclass(frozen=True, order=True)
class Prefix:
    """The outer axes of a plan, as `PlanAxes` has them."""

    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    dp: int
    microbatch: int
    microbatches: int

    @property
    def order_key(self) -> tuple[int, int, int]:
        """What the orders of schedules depend on: ranks, microbatches and stages of a rank."""
        return self.pp, self.microbatches, self.vpp


class OrderOption(NamedTuple):
    """A schedule with its limit, and whether its pairs overlap."""

    choice: ScheduleChoice
    limit: int
    overlap: bool


@dataclass(frozen=True)
class InnerAxes:
    """The values of the inner axes of a block. levels: level of recomputation, and what it applies to."""

    orders: tuple[OrderOption, ...]
    levels: tuple[tuple[str, str], ...]
    layouts: tuple[str, ...]
    methods: tuple[str, ...]
    zeros: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return len(self.orders), len(self.levels), len(self.layouts), len(self.methods), len(self.zeros)

    def columns(self) -> dict[str, Any]:
        """The inner axes by name, as arrays that broadcast over the grid."""

        def along(place: int, values: list[Any]) -> Any:
            return np.array(values).reshape([-1 if axis == place else 1 for axis in range(5)])

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
    """The plans of a prefix. legal: [orders, levels, layouts, methods, zeros] those that conditions leave in."""

    prefix: Prefix
    inner: InnerAxes
    legal: Bools

    def __len__(self) -> int:
        return int(np.count_nonzero(self.legal))

    def axes(self, number: int) -> PlanAxes:
        """The plan at a flat index of the grid."""
        order, level, layout, method, zero = (int(each) for each in np.unravel_index(number, self.inner.shape))
        prefix, option = self.prefix, self.inner.orders[order]
        recompute, where = self.inner.levels[level]
        return PlanAxes(
            tp=prefix.tp,
            cp=prefix.cp,
            pp=prefix.pp,
            vpp=prefix.vpp,
            ep=prefix.ep,
            dp=prefix.dp,
            zero=self.inner.zeros[zero],
            microbatch=prefix.microbatch,
            microbatches=prefix.microbatches,
            schedule=option.choice.name,
            limit=option.limit,
            recompute=recompute,
            where=where,
            layout=self.inner.layouts[layout],
            alltoall=self.inner.methods[method],
            overlap=option.overlap,
        )
