"""The inside of one cell, to be drawn: its program and the serial order, as spans on lanes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from schedc.cell.costs import CellCosts
from schedc.cell.graph import EXCHANGE_LANES, Lane
from schedc.cell.program import Half
from schedc.cell.serial import serial
from schedc.cell.simulate import Played, StepSpan, play
from schedc.drawing.markup import quantity
from schedc.ir.ops import OpKind
from schedc.step.cells.cell_pricing import CellKind
from schedc.step.cells.group_pricing import GroupPricing, KindOfCell
from schedc.step.cells.lone_cells import cells_on_ranks

KINDS = {Half.FORWARD: OpKind.F, Half.RECOMPUTE: OpKind.R, Half.BACKWARD: OpKind.I, Half.WEIGHT: OpKind.W}
"""The op kind whose colours each half has."""

PASSES = {
    Half.FORWARD: "forward",
    Half.RECOMPUTE: "forward once more",
    Half.BACKWARD: "backward, input gradient",
    Half.WEIGHT: "backward, weight gradient",
}


@dataclass(frozen=True)
class Panel:
    """One order of the cell in time."""

    name: str
    played: Played

    def spans(self, lane: Lane) -> list[StepSpan]:
        """The steps of a lane that take time, by their begin."""
        mine = [span for span in self.played.spans if span.task.lane is lane and span.time > 0]
        return sorted(mine, key=lambda span: span.begin)

    @property
    def marks(self) -> list[tuple[str, float]]:
        """(name, time) of the tensors that leave the cell."""
        named = (("activation leaves", self.played.activation_at), ("gradient leaves", self.played.gradient_at))
        return [(name, time) for name, time in named if time is not None]


@dataclass(frozen=True)
class CellChart:
    """A kind of cell on the stages of its forward and of its backward; a cell of one op has the same stage twice.

    group: the orders of ranks with different rows, the fullest and the emptiest; empty where all have as many.
    """

    schedule: str
    kind: CellKind
    stages: tuple[int, int]
    overlapped: Panel
    serial: Panel
    group: tuple[Panel, ...] = ()

    @classmethod
    def of(
        cls,
        schedule: str,
        kind: CellKind,
        stages: tuple[int, int],
        costs: CellCosts,
        group: GroupPricing | None = None,
    ) -> CellChart:
        halves = kind.forward, kind.backward
        return cls(
            schedule,
            kind,
            stages,
            Panel("overlapped", play(kind.program, *halves, costs)),
            Panel("serial", play(serial(kind.kind, *halves), *halves, costs)),
            () if group is None else _panels(group, KindOfCell(kind.program, *halves), costs),
        )

    @property
    def panels(self) -> tuple[Panel, ...]:
        return self.overlapped, *self.group, self.serial

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The compute lane, and the exchange lanes that carry anything."""
        used = {span.task.lane for span in self.overlapped.played.spans if span.time > 0}
        return (Lane.COMPUTE, *(lane for lane in EXCHANGE_LANES if lane in used))

    @property
    def makespan(self) -> float:
        """Time units: the time of the longer order."""
        return max(panel.played.duration for panel in self.panels)

    @cached_property
    def usual(self) -> float:
        """Time that two thirds of the steps do not exceed, without hops inside nodes; 0 where no step takes time."""
        shown = [span for lane in self.lanes if lane is not Lane.NODE for span in self.overlapped.spans(lane)]
        times = sorted(span.time for span in shown)
        return times[len(times) * 2 // 3] if times else 0.0

    @property
    def title(self) -> str:
        halves = zip(self.kind.kind, self.stages, strict=False)  # a cell of one op has its stage twice
        return f"{self.schedule}: inside {' & '.join(f'{kind} on stage {stage}' for kind, stage in halves)}"

    @property
    def facts(self) -> list[str]:
        prediction = self.kind.prediction
        bound = "its longest chain" if prediction.bound == "chain" else prediction.bound
        return [
            f"{quantity(prediction.duration)} overlapped, {quantity(self.serial.played.duration)} serial",
            f"compute {quantity(prediction.compute)}",
            *(
                f"{lane} {quantity(use.busy)}, exposed {quantity(use.exposed)}"
                for lane, use in zip(EXCHANGE_LANES, prediction.lanes, strict=True)
                if use.busy
            ),
            f"hidden {100 * prediction.hidden:.1f} %",
            f"bound by {bound}",
        ]


def _panels(group: GroupPricing, kind: KindOfCell, costs: CellCosts) -> tuple[Panel, ...]:
    """The fullest and the emptiest rank of a group."""
    played = cells_on_ranks(group, kind, costs)
    ranks = dict.fromkeys((int(group.rows.argmax()), int(group.rows.argmin())))
    return tuple(Panel(f"rank {rank} with {group.rows[rank]:.3g} of the mean rows", played[rank]) for rank in ranks)


def cell_hover(span: StepSpan) -> str:
    """The hover text of a step: ``0.experts, forward, 20 to 40 (20)``."""
    return f"{node_name(span)}, {PASSES[span.task.half]}, {interval(span)}"


def interval(span: StepSpan) -> str:
    return f"{quantity(span.begin)} to {quantity(span.end)} ({quantity(span.time)})"


def node_name(span: StepSpan) -> str:
    """The name of a step without its half: ``0.experts``, ``1.dispatch.rail``."""
    rest = span.task.name.partition(".")[2]
    return rest.removesuffix({Half.BACKWARD: ".I", Half.WEIGHT: ".W", Half.RECOMPUTE: ".again"}.get(span.task.half, ""))


def labels(span: StepSpan) -> Iterator[str]:
    """Labels for the box of a step, the longest first: ``0 experts``, ``0 exp``, ``0``."""
    layer, dot, rest = node_name(span).partition(".")
    role = rest.removesuffix(f".{span.task.lane}") if dot else layer
    number = f"{layer} " if dot else ""
    for length in (len(role), 3, 1):
        yield number + role[:length]
    if dot:
        yield layer


def layer_of(span: StepSpan) -> int:
    """The number of the step's layer; 0 where its name has none."""
    layer = node_name(span).partition(".")[0]
    return int(layer) if layer.isdecimal() else 0
