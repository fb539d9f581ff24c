"""The times by which an order is found, and the protocol of what judges the orders that were found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from schedc.ir.arrays import Floats
from schedc.ir.ops import FACTS, OpKind
from schedc.ir.schedule import Schedule
from schedc.step.costs.costs import Costs
from schedc.step.durations import alone, duration


@dataclass(frozen=True, eq=False)
class OpTimes:
    """Times of ops while ranks are simulated to find an order, all in the unit of the costs.

    alone: [kinds][stages] time of an op.
    pair: gives the time of a pair, from its kind, such as ``FB``, and the stages of its two ops.
    p2p: latency of a message between ranks.
    factors: [stages or 1, microbatches] of the times of ops; None where all microbatches cost the same.
    """

    alone: Sequence[Sequence[float]]
    pair: Callable[[str, int, int], float]
    p2p: float
    factors: Floats | None = None

    @classmethod
    def of(cls, costs: Costs, schedule: Schedule) -> OpTimes:
        """The times that costs give to ops of a schedule. Backwards recompute inside, but on stages with Rs.

        Raises `DiagnosticError`: S404 for costs of another number of stages, S412 for factors of another number of
        microbatches.
        """
        table = costs.resolved(schedule.stages)
        more = table.recompute_in_backward.copy()
        more[schedule.stage[schedule.kind == OpKind.R]] = 0.0
        times = alone(table)
        times[[kind for kind in OpKind if FACTS[kind].backward]] += more

        def pair(kind: str, first: int, second: int) -> float:
            one, other = OpKind[kind[0]], OpKind[kind[1]]
            inside = sum(more[stage] for op, stage in ((one, first), (other, second)) if FACTS[op].backward)
            return float(duration(table, one, other, (first, second)) + inside)

        return cls(times.tolist(), pair, table.p2p, costs.factors_of(schedule))


class StepTimes(NamedTuple):
    """makespan: when the last op of a step ends. span: longest time from a rank's first op to the end of its last.

    Both are in the unit of the costs.
    """

    makespan: float
    span: float


class Pricer(Protocol):
    """What knows more of the times of a step than the costs of ops tell, such as what happens inside of cells."""

    def times(self, schedule: Schedule) -> OpTimes:
        """The times by which the ranks of a schedule are simulated to find its order."""

    def step(self, schedule: Schedule) -> StepTimes | None:
        """The times of a step in this order; None for an order that is not legal."""
