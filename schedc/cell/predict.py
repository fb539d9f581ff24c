"""Predicts a cell program: duration, hidden share of communication, and the bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from schedc.cell.costs import CellCosts
from schedc.cell.graph import EXCHANGE_LANES, Lane, StageShape
from schedc.cell.program import CellProgram
from schedc.cell.simulate import play

_ROUNDING = 1e-9


@dataclass(frozen=True)
class LaneUse:
    """busy: time in which the lane carries exchanges. exposed: time in which compute blocks for an exchange."""

    busy: float
    exposed: float

    @property
    def hidden(self) -> float:
        return self.busy - self.exposed


@dataclass(frozen=True)
class Prediction:
    """Times of one cell from its start, in the unit of its costs.

    duration: ``compute`` plus all exposed communication. compute: time of the segments.
    lanes: [3] use of each of `schedc.cell.graph.EXCHANGE_LANES`.
    activation_at, gradient_at: when the forward's outputs, and the gradients of the backward's inputs, are complete
        and may be sent; None where the cell has none.
    chain: time of the longest chain of dependent segments and exchanges. No order is shorter.
    """

    duration: float
    compute: float
    lanes: tuple[LaneUse, ...]
    activation_at: float | None
    gradient_at: float | None
    chain: float

    @property
    def communication(self) -> float:
        return sum(lane.busy for lane in self.lanes)

    @property
    def exposed(self) -> float:
        return sum(lane.exposed for lane in self.lanes)

    @property
    def hidden(self) -> float:
        """Share of the communication that is hidden, 0 to 1; 1 where nothing is communicated."""
        return hidden_share(self.communication, self.exposed)

    @property
    def bound(self) -> str:
        """The resource that bounds the duration: ``compute``, a lane, or ``chain``."""
        if self.exposed <= _ROUNDING * self.duration:
            return Lane.COMPUTE.value
        limits = {"chain": self.chain}
        limits |= {lane.value: use.busy for lane, use in zip(EXCHANGE_LANES, self.lanes, strict=True)}
        limits[Lane.COMPUTE.value] = self.compute
        return max(limits, key=lambda name: limits[name])


def hidden_share(communication: float, exposed: float) -> float:
    """1 - exposed / communication, both in one unit of time; 1 where nothing is communicated."""
    return 1.0 - exposed / communication if communication else 1.0


@lru_cache(4096)
def predict(
    program: CellProgram,
    forward: StageShape | None,
    backward: StageShape | None,
    costs: CellCosts,
    backward_costs: CellCosts | None = None,
) -> Prediction:
    """Times of a cell program in the unit of ``costs``, as `schedc.cell.simulate.play` runs it."""
    played = play(program, forward, backward, costs, backward_costs)
    busy, exposed = (
        [sum(span.time for span in spans if span.task.lane is lane) for lane in EXCHANGE_LANES]
        for spans in (played.spans, played.waits)
    )
    return Prediction(
        duration=played.duration,
        compute=sum(time for time, task in zip(played.costs, played.tasks.all, strict=True) if not task.exchange),
        lanes=tuple(LaneUse(*use) for use in zip(busy, exposed, strict=True)),
        activation_at=played.activation_at,
        gradient_at=played.gradient_at,
        chain=max(played.tasks.longest_paths(played.costs), default=0.0),
    )
