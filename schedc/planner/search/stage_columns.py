"""Times, bytes and parameters of the stages of many plans of one order, as batched simulations take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.model.spread import Spread
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.part_table import LEVELS, OP
from schedc.planner.price.rank_loads import rank_loads
from schedc.planner.price.states import gathered_bytes, held_parameters, outside_pipeline
from schedc.planner.search.orders import KnownOrder
from schedc.planner.search.placed_counts import KINDS
from schedc.step.costs.batch import CostBatch


@dataclass(frozen=True, eq=False)
class StageColumns:
    """K plans that have one order. plans: [K], of one schedule on the same ranks."""

    plans: Sequence[PlannedStep]

    @cached_property
    def rows(self) -> Int64:
        """[K] row of the part table."""
        return np.array([plan.row for plan in self.plans], np.int64)

    @cached_property
    def levels(self) -> Int64:
        """[K, stages] level of recomputation, by `LEVELS`."""
        return np.array([plan.levels for plan in self.plans], np.int64)

    @cached_property
    def counts(self) -> Floats:
        """[K, stages, kinds] parts of each stage."""
        return np.array([plan.layout.counts[:, :KINDS] for plan in self.plans], np.float64)

    @cached_property
    def on_rank(self) -> Floats:
        """[P, stages] 1 where a rank holds a stage."""
        placement = self.plans[0].placement
        return np.asarray(placement.rank_of_stage[0] == np.arange(placement.ranks)[:, None], np.float64)

    def _stages(self, of_parts: Floats) -> Floats:
        """[K, stages] sums over parts. of_parts: [K, kinds]."""
        return np.asarray(np.einsum("ksp,kp->ks", self.counts, of_parts))

    def _by_level(self, of_parts: Floats) -> Floats:
        """[K, stages] sums over parts at the level of each stage. of_parts: [K, levels, kinds]."""
        chosen = [self._stages(of_parts[:, level]) * (self.levels == level) for level in range(len(LEVELS))]
        return np.asarray(np.sum(chosen, axis=0))

    def costs(self) -> CostBatch:
        """Seconds of F, I and W of each stage, and of messages."""
        table, rows = self.plans[0].table, self.rows
        factor = table.split_factor(self.plans[0].choice.splits)
        again = self._by_level(table.again[rows])
        F, I, W = (  # noqa: E741
            self._stages(time[rows, :OP] * share) + time[rows, OP][:, None]
            for time, share in ((table.forward, 1.0), (table.input, factor), (table.weight, factor))
        )
        return CostBatch(F, I + again, W, p2p=table.p2p[rows])

    def peaks(self, order: KnownOrder) -> Floats:
        """[K] bytes of the fullest rank, with parameters and what no order counts."""
        table, rows = self.plans[0].table, self.rows
        held = self._by_level(table.held[rows])
        pending = self._stages(table.pending[rows]) if self.plans[0].choice.splits else held
        activations = order.peaks.peaks(held, pending)
        reserve = table.reserve[rows, self.levels.max(axis=1), [int(plan.axes.overlap) for plan in self.plans]]
        gathered = gathered_bytes(self.plans[0].problem.model, self.spread, self._one_stage)
        return np.asarray((activations + self._on_ranks(self._parameter_bytes)).max(axis=0) + reserve + gathered)

    def _on_ranks(self, of_parts: Floats) -> Floats:
        """[P, K] sums over the parts of ranks. of_parts: [K, kinds]."""
        return np.asarray(self.on_rank @ self._stages(of_parts).T)

    @cached_property
    def _one_stage(self) -> bool:
        return bool(self.on_rank.shape[1] == 1)

    @cached_property
    def _parameter_bytes(self) -> Floats:
        return held_parameters(self.plans[0].problem.model, self.spread, self._one_stage)

    @cached_property
    def spread(self) -> Spread[Floats]:
        """The spread of parameters, [K] each."""
        rows = [[getattr(plan.axes, each.name) for each in fields(Spread)] for plan in self.plans]
        return Spread(*np.array(rows, np.float64).T)

    def steps(self, makespan: Floats) -> Floats:
        """[K] seconds of a step. makespan: [K] of its pipeline."""
        first = self.plans[0]
        loads = rank_loads(first.table, self.rows, self.on_rank @ self.counts, self.on_rank.shape[1])
        beside = outside_pipeline(first.problem, self.spread, loads, first.axes.microbatches, makespan)
        return np.asarray(makespan + beside.gradients + beside.optimizer + beside.step)
