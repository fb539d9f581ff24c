"""Times of cells whose microbatches cost unequally: factors by stage and microbatch multiply the times of ops.

An overlapped pair of microbatches of factors f <= g overlaps as far as both reach: f times the pair, and g - f times
the op of the larger one alone. So it is f F + g B without an overlap, and never shorter than either op, if FB is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from schedc.ir.arrays import Floats, Int32, Int64
from schedc.ir.schedule import Schedule
from schedc.step.cell_durations import alike_durations, single_ops
from schedc.step.costs.costs import StageCosts
from schedc.step.dependencies import Dependencies

Times = TypeVar("Times", float, Floats)


def pair_time(first: Times, second: Times, both: Times, whole: Times, alone: Times, beside: Times) -> Times:
    """The time of an overlapped pair, a number or an array of any shape.

    first, second: factors of its two ops; both: the smaller one. whole: its time where both are 1. alone, beside: times
    of the ops alone.
    """
    return both * whole + (first - both) * alone + (second - both) * beside


def op_factors(factors: Floats | None, schedule: Schedule) -> Floats:
    """[ops] the factor of each op. factors: [stages or 1, microbatches]; None: all are 1."""
    if factors is None:
        return np.ones(len(schedule))
    return np.asarray(
        np.broadcast_to(factors, (schedule.stages, factors.shape[1]))[schedule.stage, schedule.microbatch]
    )


@dataclass(frozen=True, eq=False)
class CellParts:
    """Times of cells and ops at a factor of 1. Times are in any one unit, also whole numbers.

    dependencies: the order of the cells. whole: [cells] their times. ops: [ops] times of single ops.
    """

    dependencies: Dependencies
    whole: Floats
    ops: Floats

    @classmethod
    def of(cls, dependencies: Dependencies, costs: StageCosts) -> CellParts:
        """The parts under costs of stages, whose factors are left out."""
        whole = alike_durations(dependencies, costs)
        return cls(dependencies, whole, single_ops(dependencies.schedule, costs))

    @cached_property
    def _of_first(self) -> tuple[Int64, Int64]:
        return self._stage_and_microbatch(self.dependencies.first)

    @cached_property
    def _of_pairs(self) -> tuple[Int64, Int64, Int64]:
        """[pairs] the cells of pairs, and stage and microbatch of their second ops."""
        pairs = np.flatnonzero(self.dependencies.pairs)
        return pairs, *self._stage_and_microbatch(self.dependencies.second[pairs])

    def _stage_and_microbatch(self, rows: Int32) -> tuple[Int64, Int64]:
        schedule = self.dependencies.schedule
        return schedule.stage[rows].astype(np.int64), schedule.microbatch[rows].astype(np.int64)

    def times(self, factors: Floats) -> Floats:
        """[cells] or [cells, K] times of cells; where all factors are 1, ``whole`` to the bit.

        factors: [stages or 1, microbatches] or [stages or 1, microbatches, K].
        """

        def of(stage: Int64, microbatch: Int64) -> Floats:
            return factors[stage, microbatch] if len(factors) > 1 else factors[0, microbatch]

        shape = (-1, *[1] * (factors.ndim - 2))
        first = of(*self._of_first)
        times = first * self.whole.reshape(shape)
        pairs, *other = self._of_pairs
        if pairs.size:
            known = self.dependencies
            one, two, whole = first[pairs], of(*other), self.whole[pairs].reshape(shape)
            alone, beside = (self.ops[rows[pairs]].reshape(shape) for rows in (known.first, known.second))
            times[pairs] = pair_time(one, two, np.minimum(one, two), whole, alone, beside)
        return times
