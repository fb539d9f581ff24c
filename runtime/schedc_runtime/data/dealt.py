"""Deals the rows of a step to replicas and microbatches by their cost, and orders microbatches inside the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Int64
from schedc.ir.program import Program, computation
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.row_order import TRIES, MicrobatchPricer, order_microbatches
from schedc_runtime.data.even import EvenBound, even_bound, even_sums
from schedc_runtime.errors import RuntimeFault


@dataclass(frozen=True, eq=False)
class Deal:
    """How the rows of a step lie. experts: replicas that share experts, neighbours.

    rows: [replicas, microbatches, rows of a microbatch] their numbers. costs: [replicas, microbatches] sums of costs.
    bound: what no deal undercuts: the largest sum of a group of replicas that share experts, over the mean.
    """

    rows: Int64
    costs: Int64
    experts: int
    bound: EvenBound

    @property
    def unevenness(self) -> float:
        """The largest sum of a group of replicas that share experts, over the mean of all groups; from 1 on."""
        sums = self.costs.reshape(-1, self.experts * self.costs.shape[1]).sum(axis=1)
        largest: float = float(sums.max()) * sums.size / float(sums.sum())
        return largest

    def group_costs(self, replica: int) -> Int64:
        """[microbatches] the largest cost of each position among the replicas that share experts with ``replica``."""
        first = replica - replica % self.experts
        largest: Int64 = self.costs[first : first + self.experts].max(axis=0)
        return largest

    def __str__(self) -> str:
        """One line: how uneven the sums are, the bound, and the row that sets it."""
        why = f", set by row {self.bound.row}" if self.bound.row >= 0 else ""
        return f"fullest replicas over the mean: {self.unevenness:.4f}; no deal is below {self.bound.ratio:.4f}{why}"


def deal(costs: Int64, microbatches: int, replicas: int = 1, experts: int = 1, rows: int = 1) -> Deal:
    """Share the rows of a step by cost: equal numbers of rows for all replicas and microbatches.

    Groups of ``experts`` neighbouring replicas share experts: they run each position together, at the pace of the
    slowest. Sums of groups are made even. Inside a group, sorted rows are cut into positions of alike rows: with one
    row per microbatch no grouping has a smaller sum of largest costs. Without shared experts only sums count.

    costs: [replicas * microbatches * rows] of the rows, whole numbers from 1. rows: of a microbatch.
    """
    if min(microbatches, replicas, experts, rows) < 1 or replicas % experts:
        raise RuntimeFault(
            f"{replicas} replicas in groups of {experts}, {microbatches} microbatches of {rows} rows",
            "give numbers from 1 on; groups divide the replicas",
        )
    wanted = replicas * microbatches * rows
    if costs.shape != (wanted,) or int(costs.min()) < 1:
        raise RuntimeFault(f"costs of shape {list(costs.shape)} for {wanted} rows", "give each row a cost from 1 on")
    groups = replicas // experts
    dealt = np.empty((groups, experts, microbatches, rows), np.int64)
    for group, own in enumerate(even_sums(costs, groups)):
        dealt[group] = _positions(own, costs, experts, microbatches)
    numbers = dealt.reshape(replicas, microbatches, rows)
    return Deal(numbers, costs[numbers].sum(axis=2), experts, even_bound(costs, groups))


def _positions(own: Int64, costs: Int64, experts: int, microbatches: int) -> Int64:
    """[experts, microbatches, rows] the rows of one group. own: [experts * microbatches * rows] their numbers."""
    if experts == 1:
        return own[even_sums(costs[own], microbatches)][None]
    alike = own[np.argsort(-costs[own], kind="stable")].reshape(microbatches, -1)
    return np.stack([position[even_sums(costs[position], experts)] for position in alike], axis=1)


def pricer_of(program: Program, costs: Costs | None = None) -> MicrobatchPricer:
    """What prices the steps of a program for `order_rows`. costs: of ops; by default an op takes one unit.

    Raises `DiagnosticError` for costs that do not fit the schedule.
    """
    return MicrobatchPricer.of(Dependencies.of(computation(program)[0]), costs or Costs())


def order_rows(costs: Int64, pricer: MicrobatchPricer, tries: int = TRIES) -> Int64:
    """[microbatches] the order with the shortest step of all that are tried: place i holds microbatch order[i].

    The number of tries is fixed, and all is whole numbers: every rank gives the same order.
    costs: [microbatches] of one pipeline; of replicas that share experts, their largest at each position
    (`Deal.group_costs`).
    """
    if costs.shape[-1] != pricer.microbatches:
        raise RuntimeFault(
            f"costs of {costs.shape[-1]} microbatches, the program has {pricer.microbatches}",
            "deal rows to as many microbatches as the program has",
        )
    return order_microbatches(costs, pricer, tries)
