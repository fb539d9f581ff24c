"""Chooses the program of a step and the order of its microbatches, in milliseconds, with a floor as certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from schedc.ir.arrays import Int64
from schedc.ir.program import Program, computation
from schedc.search.unequal_floors import UnequalFloor, unequal_floor
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.memory import measure_memory
from schedc.step.row_order import MicrobatchPricer, PricedOrder, few_bits, search_order
from schedc_runtime.errors import RuntimeFault

LOOKS, NEXT = 16, 48
"""Orders that are priced of each program, and of the chosen one after that."""


@dataclass(frozen=True)
class StepChoice:
    """What runs a step: `Pipeline.step` takes it as ``choice``.

    number: of the program; 0 for the pipeline's own, n for ``others[n - 1]``. name: of its schedule.
    orders: [replicas here][microbatches] place i holds microbatch orders[replica][i] of the deal.
    makespan: of the slowest replica here, in the unit of the costs of ops; a microbatch of mean cost has a factor of 1.
    floor: what no order of the ops of any of the programs undercuts, with the microbatches in any order; 0 if unknown.
    """

    number: int
    name: str
    orders: tuple[tuple[int, ...], ...]
    makespan: float
    floor: float

    def __str__(self) -> str:
        """One line: the program, its step, and the floor."""
        step = f"{self.name} (program {self.number}): {self.makespan:.4g}"
        if not self.floor:
            return f"{step}; no floor with recomputations or segments"
        return f"{step}, {self.makespan / self.floor:.4f} of the floor {self.floor:.4g}"


@dataclass(frozen=True, eq=False)
class ProgramChoices:
    """The programs of a pipeline, among which each step has a choice.

    names: of their schedules. pricers: in one unit, of which ``scale`` are a unit of the costs of ops.
    floors: of their ops, in the memory of the fullest program on each rank. Programs of the same ops share one; None
    without a floor.
    """

    names: tuple[str, ...]
    scale: float
    pricers: tuple[MicrobatchPricer, ...]
    floors: tuple[UnequalFloor | None, ...]

    @classmethod
    def of(cls, programs: Sequence[Program], costs: Costs) -> ProgramChoices:
        """costs: of ops. Raises `RuntimeFault` for programs of other ranks or numbers of microbatches."""
        first = programs[0]
        for each in programs[1:]:
            if (each.ranks, each.stages, each.microbatches) != (first.ranks, first.stages, first.microbatches):
                raise RuntimeFault(
                    f"{each.name} has {each.ranks} ranks, {each.stages} stages and {each.microbatches} microbatches,"
                    f" {first.name} has {first.ranks}, {first.stages} and {first.microbatches}",
                    "compile all programs for the same ranks, stages and microbatches",
                )
        schedules = [computation(program)[0] for program in programs]
        scale, pricers = MicrobatchPricer.alike([Dependencies.of(each) for each in schedules], costs)
        caps = reduce(np.maximum, (measure_memory(each, costs).peak_memory for each in schedules))
        stage_costs = costs.resolved(first.stages)
        distinct = {_ops(pricer): pricer for pricer in pricers}.values()
        floors = tuple(unequal_floor(pricer, stage_costs, caps) for pricer in distinct)
        return cls(tuple(each.name for each in programs), scale, tuple(pricers), floors)

    def choose(self, groups: Int64, here: Sequence[int], tries: int = NEXT) -> StepChoice:
        """What runs a step: the same program on all ranks, as all is a number of tries in whole numbers.

        groups: [groups, microbatches] costs of replicas that take one order. The dearest group chooses the program.
        here: the group of each replica here. tries: orders of the chosen program to price after `LOOKS` of each.
        """
        costs = few_bits(groups)
        dearest = int(costs.sum(axis=1).argmax())
        looks = [search_order(costs[dearest], pricer, LOOKS, LOOKS) for pricer in self.pricers]
        number = min(range(len(looks)), key=lambda each: looks[each].makespan)
        found = {group: self._order(number, costs[group], tries, looks[number] if group == dearest else None)
                 for group in dict.fromkeys(here)}  # fmt: skip
        floor = max(self._floor(costs[group]) for group in found)
        slowest = max(found, key=lambda group: self._time(found[group].makespan, costs[group]))
        return StepChoice(
            number,
            self.names[number],
            tuple(tuple(found[group].order.tolist()) for group in here),
            self._time(found[slowest].makespan, costs[slowest]),
            floor,
        )

    def _order(self, number: int, costs: Int64, tries: int, look: PricedOrder | None) -> PricedOrder:
        pricer = self.pricers[number]
        look = look or search_order(costs, pricer, LOOKS, LOOKS)
        return search_order(costs, pricer, tries, start=look.order) if tries else look

    def _floor(self, costs: Int64) -> float:
        """The floor of the program that has the least; 0 if one has none."""
        if any(floor is None for floor in self.floors):
            return 0.0
        return self._time(min(floor.ticks(costs) for floor in self.floors if floor is not None), costs)

    def _time(self, ticks: int, costs: Int64) -> float:
        """Ticks of a group's step in the unit of the costs of ops."""
        return ticks / self.scale / float(costs.mean())


def _ops(pricer: MicrobatchPricer) -> bytes:
    """The ops of a program, with those that they are paired with, in no order."""
    known, schedule = pricer.parts.dependencies, pricer.parts.dependencies.schedule
    partner = np.full(len(schedule), -1, np.int64)
    cells = np.flatnonzero(known.pairs)
    partner[known.first[cells]] = known.second[cells]
    kind, stage = (np.where(partner >= 0, column[partner], -1) for column in (schedule.kind, schedule.stage))
    rows = np.stack([schedule.rank, schedule.kind, schedule.stage, schedule.microbatch, kind, stage])
    return np.asarray(rows[:, np.lexsort(rows)]).tobytes()
