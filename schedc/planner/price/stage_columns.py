"""Times, bytes and parameters of the stages of many plans of one order, under many constants: what prices are made of.

The same columns price the plans of a search, rows that are predicted, and rows that constants are fitted to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.model.spread import Spread
from schedc.plan.layout.costs import over_parts
from schedc.plan.layout.parts import WORK
from schedc.planner.price.files import PlannedStep
from schedc.planner.price.orders import KnownOrder
from schedc.planner.price.part_table import OP, PartTable
from schedc.planner.price.recomputed import LEVELS
from schedc.planner.price.states import (
    OutsidePipeline,
    gathered_bytes,
    held_parameters,
    kind_parameters,
    outside_pipeline,
)
from schedc.step.costs.batch import CostBatch
from schedc.step.costs.costs import Costs


@dataclass(frozen=True, eq=False)
class PlansOfOrder:
    """Plans of one order, with columns that no constant decides. plans: [n], of one schedule on the same ranks."""

    plans: Sequence[PlannedStep]

    @cached_property
    def levels(self) -> Int64:
        """[n, stages] level of recomputation, by `LEVELS`."""
        return np.array([plan.levels for plan in self.plans], np.int64)

    @cached_property
    def counts(self) -> Floats:
        """[n, 1, stages, kinds] parts of each stage."""
        return np.array([plan.layout.counts[:, : len(WORK)] for plan in self.plans], np.float64)[:, None]

    @cached_property
    def of_ranks(self) -> Floats:
        """[n, 1, P, kinds] parts of each rank."""
        return np.asarray(self.on_rank @ self.counts)

    @cached_property
    def on_rank(self) -> Floats:
        """[P, stages] 1 where a rank holds a stage."""
        placement = self.plans[0].placement
        return np.asarray(placement.rank_of_stage[0] == np.arange(placement.ranks)[:, None], np.float64)

    @property
    def one_stage(self) -> bool:
        return bool(self.on_rank.shape[1] == 1)

    @cached_property
    def spread(self) -> Spread[Floats]:
        """The spread of parameters, [n, 1] each."""
        rows = [[getattr(plan.axes, each.name) for each in fields(Spread)] for plan in self.plans]
        return Spread(*np.array(rows, np.float64).T[..., None])

    @cached_property
    def parameters(self) -> Floats:
        """[n, 1, kinds, 2] parameters of a part of each kind: outside of experts, and in experts."""
        of_plans = (kind_parameters(plan.problem.model, self.one_stage, plan.axes.tp) for plan in self.plans)
        return np.stack(list(of_plans))[:, None]

    @cached_property
    def microbatches(self) -> Floats:
        """[n, 1] microbatches of a pipeline and step."""
        return np.array([[plan.axes.microbatches] for plan in self.plans], np.float64)

    @cached_property
    def free(self) -> Int64:
        """[n, 1] 1 where ranks start the next step without a wait."""
        return np.array([[int(plan.problem.stack.free_steps)] for plan in self.plans])


@dataclass(frozen=True, eq=False)
class StageColumns:
    """Plans of one order under the K vectors of a table of parts."""

    of: PlansOfOrder
    table: PartTable

    @classmethod
    def of_plans(cls, plans: Sequence[PlannedStep]) -> StageColumns:
        """The columns of plans with a common order and table."""
        return cls(PlansOfOrder(plans), plans[0].table)

    @cached_property
    def runs(self) -> Int64:
        """[n] runs of the table."""
        return np.array([plan.row for plan in self.of.plans], np.int64)

    @cached_property
    def rows(self) -> Int64:
        """[n, K] rows of the table."""
        K = len(self.table.constants)
        return self.runs[:, None] * K + np.arange(K)

    def _by_level(self, of_parts: Floats) -> Floats:
        """[n, K, stages] sums over parts at the level of each stage. of_parts: [n, K, levels, kinds]."""
        used = range(len(LEVELS)) if len(self.of.plans) > 1 else set(self.of.levels.ravel().tolist())
        levels = self.of.levels[:, None]
        chosen = [over_parts(self.of.counts, of_parts[..., level, :]) * (levels == level) for level in used]
        return np.asarray(np.sum(chosen, axis=0))

    @cached_property
    def recompute_seconds(self) -> Floats:
        """[n, K, stages] seconds that a backward recomputes for."""
        if not self.of.levels.any():
            return np.zeros((*self.rows.shape, self.of.levels.shape[1]))
        return self._by_level(self.table.recompute_seconds[self.rows])

    @cached_property
    def stages(self) -> tuple[Floats, Floats, Floats]:
        """[n, K, stages] seconds of F, I and W of each stage, without what backwards recompute."""
        table, rows = self.table, self.rows
        factor = table.split[:, None] if self.of.plans[0].choice.splits else 1.0

        def times(time: Floats, share: Floats | float) -> Floats:
            return over_parts(self.of.counts, time[rows][..., :OP] * share) + time[rows][..., OP:]

        return times(table.forward, 1.0), times(table.input, factor), times(table.weight, factor)

    def batch(self) -> CostBatch:
        """Seconds of F, I and W of each stage, and of messages: n x K vectors of costs."""
        F, I, W = (time.reshape(self.rows.size, -1) for time in self.stages)  # noqa: E741
        more = self.recompute_seconds.reshape(self.rows.size, -1)
        return CostBatch(F, I + more, W, B=I + W + more, p2p=self.table.p2p[self.rows.ravel()])

    def costs(self, vector: int = 0) -> Costs:
        """Seconds of the stages of the first plan under a vector, as the compiler reads them of its files."""
        F, I, W = (tuple(time[0, vector].tolist()) for time in self.stages)  # noqa: E741
        more = tuple(self.recompute_seconds[0, vector].tolist())
        return Costs(F=F, I=I, W=W, p2p=float(self.table.p2p[self.rows[0, vector]]), recompute_in_backward=more)

    def rank_bytes(self, order: KnownOrder) -> Floats:
        """[P, n] bytes of each rank at its peak, with parameters."""
        held = self._by_level(self.table.held[self.runs][:, None])[:, 0]
        if self.of.plans[0].choice.splits:
            pending = over_parts(self.of.counts, self.table.pending[self.runs][:, None])[:, 0]
        else:
            pending = held
        return order.peaks.peaks(held, pending) + self.parameter_bytes

    @cached_property
    def parameter_bytes(self) -> Floats:
        """[P, n] bytes of the parameters of each rank, with gradients and optimizer."""
        of_kinds = held_parameters(self.of.parameters[:, 0], self.of.spread)
        return np.asarray(over_parts(self.of.of_ranks, of_kinds)[:, 0].T)

    def reserve(self) -> Floats:
        """[n] bytes that no order counts."""
        overlap = [int(plan.axes.overlap) for plan in self.of.plans]
        buffers = self.table.reserve[self.runs, self.of.levels.max(axis=1), overlap]
        return np.asarray(buffers + gathered_bytes(self.of.parameters[:, 0], self.of.spread)[:, 0])

    def peaks(self, order: KnownOrder) -> Floats:
        """[n] bytes of the fullest rank, with parameters and what no order counts."""
        return np.asarray(self.rank_bytes(order).max(axis=0) + self.reserve())

    def beside(self, pipeline: Floats) -> OutsidePipeline:
        """What steps take beside their pipelines. pipeline: [n, K] seconds."""
        machine = self.table.machine.of_runs(self.runs)
        loads = self.table.loads(self.rows, self.of.of_ranks, self.of.parameters, self.of.counts.shape[2])
        return outside_pipeline(machine, self.of.spread, loads, self.of.microbatches, pipeline)

    def steps(self, pipeline: Floats) -> Floats:
        """[n, K] seconds of a step. pipeline: [n, K] seconds."""
        return self.beside(pipeline).step_of(pipeline)
