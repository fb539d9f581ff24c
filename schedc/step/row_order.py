"""The order of unequal microbatches in a step: a search in whole numbers, which every rank repeats to the same end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedc.diagnostics import CompilerBug
from schedc.ir.arrays import Floats, Int64, Scalar
from schedc.ir.ops import OpKind
from schedc.step.batch import edges
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import run_durations
from schedc.step.unequal import CellParts

TRIES = 2_400
"""Orders that a search prices where nobody says more."""

_AT_ONCE = 48
"""Orders that are priced side by side; the search goes on from the best of them."""

_IN_MEMORY = 1 << 23
"""Cells times orders whose times are in memory at once."""

_SEED = 6

_EXACT, _OF_COST, _OF_TIME = 52, 16, 20
"""Bits of a sum of whole numbers that a double holds exactly; most bits of a microbatch's cost, and of a time."""


@dataclass(frozen=True, eq=False)
class MicrobatchPricer:
    """Gives the makespans of a step whose microbatches have given costs, in whole numbers: alike on all machines.

    parts: [cells] times of cells at mean cost, whole numbers. latency: time of a message, likewise.
    segments: of each microbatch along its sequence. All segments of a microbatch have its cost, as if cut by work.
    """

    parts: CellParts
    latency: int
    segments: int = 1

    @classmethod
    def of(cls, dependencies: Dependencies, costs: Costs, segments: int = 1) -> MicrobatchPricer:
        """The pricer of a legal schedule. Factors of microbatches in ``costs`` are left out."""
        stage_costs = costs.resolved(dependencies.schedule.stages)
        return cls.rounded(CellParts.of(dependencies, stage_costs), stage_costs.p2p, segments)

    @classmethod
    def rounded(cls, parts: CellParts, latency: float, segments: int = 1) -> MicrobatchPricer:
        """The pricer of cells with these times, of any unit, in whole numbers of at most 20 bits."""
        return cls._at(_scale(parts, latency), parts, latency, segments)

    @classmethod
    def alike(cls, steps: Sequence[Dependencies], costs: Costs) -> tuple[float, list[MicrobatchPricer]]:
        """Pricers of several schedules in one unit, and its number in a unit of ``costs``."""
        parts = [CellParts.of(step, costs.resolved(step.schedule.stages)) for step in steps]
        latency = costs.resolved(steps[0].schedule.stages).p2p
        scale = min(_scale(each, latency) for each in parts)
        return scale, [cls._at(scale, each, latency) for each in parts]

    @classmethod
    def _at(cls, scale: float, parts: CellParts, latency: float, segments: int = 1) -> MicrobatchPricer:
        whole, ops = np.rint(parts.whole * scale), np.rint(parts.ops * scale)
        return cls(CellParts(parts.dependencies, whole, ops), round(latency * scale), segments)

    @property
    def microbatches(self) -> int:
        return self.parts.dependencies.schedule.microbatches // self.segments

    @cached_property
    def turns(self) -> Int64:
        """[microbatches] places of microbatches by the time of their first forward, where all cost the same."""
        known = self.parts.dependencies
        start, _ = run_durations(known, self.parts.whole, float(self.latency))
        forward = np.flatnonzero(known.schedule.kind == OpKind.F)
        first = np.full(known.schedule.microbatches, np.inf)
        np.minimum.at(first, known.schedule.microbatch[forward], start[known.cell_of[forward]])
        return np.argsort(first.reshape(-1, self.segments).min(axis=1), kind="stable").astype(np.int64)

    def makespans(self, durations: Int64) -> Int64:
        """[K] makespans, in one unit for all K orders of the same costs. Costs are whole numbers of at most 16 bits.

        durations: [K, 1 or stages, microbatches] costs of the microbatches in the places of each order.
        """
        known, mean = self.parts.dependencies, int(durations[:1].sum()) // max(1, durations[0].size)
        every, latency = np.arange(len(known)), float(self.latency * mean)
        width = max(1, _IN_MEMORY // max(1, len(known)))
        makespans = []
        for first in range(0, len(durations), width):
            costs = repeat_segments(durations[first : first + width], self.segments).transpose(1, 2, 0)
            times = self.parts.times(np.ascontiguousarray(costs, np.float64))
            _, end = edges(known, every, times, np.full(times.shape[1], latency))
            makespans.append(end.max(axis=0, initial=0.0))
        return np.concatenate(makespans).astype(np.int64)


def repeat_segments(costs: npt.NDArray[Scalar], segments: int) -> npt.NDArray[Scalar]:
    """[..., microbatches * segments] costs of microbatches, [..., microbatches], for each of their segments."""
    every = np.broadcast_to(costs[..., None], (*costs.shape, segments))
    return every.reshape(*costs.shape[:-1], -1)


def order_microbatches(durations: Int64, pricer: MicrobatchPricer, tries: int = TRIES) -> Int64:
    """[M] the order of microbatches with the shortest step of all that are tried: place i holds microbatch order[i].

    First the smallest stand at both ends and the largest in the middle. Then two places change at a time: of 48 such
    orders the best goes on, unless it is worse. The tries are a number, never a time: equal inputs give equal orders.

    durations: [M] costs of microbatches, or [stages, M] by stage: whole numbers of any unit, from 0.
    pricer: of the step. tries: orders to price.
    """
    return search_order(few_bits(durations), pricer, tries).order


class PricedOrder(NamedTuple):
    """An order of microbatches, [M]: place i holds microbatch order[i]. makespan: as of `MicrobatchPricer`."""

    order: Int64
    makespan: int


def search_order(
    durations: Int64, pricer: MicrobatchPricer, tries: int, at_once: int = _AT_ONCE, start: Int64 | None = None
) -> PricedOrder:
    """As `order_microbatches`, for costs of at most 16 bits. at_once: orders side by side. start: [M] the first."""
    costs = np.atleast_2d(durations)
    if costs.shape[1] != pricer.microbatches:
        raise CompilerBug("row order", f"costs of {costs.shape[1]} microbatches, the step has {pricer.microbatches}")
    order = _ends_first(costs.sum(axis=0), pricer.turns) if start is None else start
    source = np.random.PCG64(_SEED)  # the stream of its raw numbers is the same in all versions and on all machines
    M, least, row = order.size, -1, np.arange(at_once)
    for _ in range(tries // at_once if M > 1 else 0):
        raw = source.random_raw(2 * at_once).reshape(2, at_once)
        one = raw[0] % np.uint64(M)
        other = (one + raw[1] % np.uint64(M - 1) + np.uint64(1)) % np.uint64(M)
        tried = np.tile(order, (at_once + (least < 0), 1))
        tried[row, one], tried[row, other] = order[other], order[one]
        makespans = pricer.makespans(costs[:, tried].swapaxes(0, 1))
        least = int(makespans[-1]) if least < 0 else least
        best = int(makespans[:at_once].argmin())
        if makespans[best] <= least:  # an equal one goes on too: several ranks may bound the step
            order, least = tried[best], int(makespans[best])
    return PricedOrder(order, least if least >= 0 else int(pricer.makespans(costs[None, :, order])[0]))


def whole_costs(costs: Floats) -> Int64:
    """[...] costs of microbatches in whole numbers, by which an order is searched. The dearest one has all the bits.

    costs: [...] numbers from 0 of any unit, one of them above 0.
    """
    return np.asarray(np.rint(costs * (((1 << _OF_COST) - 1) / costs.max())), np.int64)


def _scale(parts: CellParts, latency: float) -> float:
    """Ticks in a unit of time, so that no sum of a step is rounded."""
    bits = min(_OF_TIME, _EXACT - _OF_COST - (3 * len(parts.dependencies)).bit_length())
    largest = max(float(parts.whole.max(initial=0.0)), float(parts.ops.max(initial=0.0)), latency)
    return (1 << max(bits, 1)) / largest if largest else 0.0


def few_bits(costs: Int64) -> Int64:
    """[...] the costs without the low bits that those of more than 16 bits have; at least 1 remains of any cost."""
    excess = max(0, int(costs.max(initial=0)).bit_length() - _OF_COST)
    return np.where(costs > 0, np.maximum(costs.astype(np.int64) >> excess, 1), 0)


def _ends_first(costs: Int64, turns: Int64) -> Int64:
    """[M] microbatches in places, the smallest at both ends. costs: [M]; turns: [M] places in the order of time."""
    M = costs.size
    inward = np.empty(M, np.int64)  # first place, last place, second place, and so on
    inward[::2], inward[1::2] = np.arange((M + 1) // 2), M - 1 - np.arange(M // 2)
    order = np.empty(M, np.int64)
    order[turns[inward]] = np.argsort(costs, kind="stable")
    return order
