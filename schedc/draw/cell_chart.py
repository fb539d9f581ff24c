"""What there is to draw of one cell from inside: its program and the serial order, lane by lane."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from schedc.analysis.cell_pricing import CellKind
from schedc.cell.costs import CellCosts
from schedc.cell.graph import EXCHANGE_LANES, Lane
from schedc.cell.program import Half
from schedc.cell.schedule import serial_program
from schedc.cell.simulate import Played, StepSpan, play
from schedc.draw.markup import quantity
from schedc.ir.ops import OpKind

KINDS = {Half.FORWARD: OpKind.F, Half.RECOMPUTE: OpKind.R, Half.BACKWARD: OpKind.I, Half.WEIGHT: OpKind.W}
"""Whose colours each half has."""

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
        """What the lane does, by time; what takes none is left out."""
        mine = [span for span in self.played.spans if span.task.lane is lane and span.time > 0]
        return sorted(mine, key=lambda span: span.begin)

    @property
    def marks(self) -> list[tuple[str, float]]:
        """What leaves the cell, and when."""
        named = (("activation leaves", self.played.activation_at), ("gradient leaves", self.played.gradient_at))
        return [(name, time) for name, time in named if time is not None]


@dataclass(frozen=True)
class CellChart:
    """A kind of cell on two stages (of which it uses one, or both)."""

    schedule: str
    kind: CellKind
    stages: tuple[int, int]
    overlapped: Panel
    serial: Panel

    @classmethod
    def of(cls, schedule: str, kind: CellKind, stages: tuple[int, int], costs: CellCosts) -> CellChart:
        halves = kind.forward, kind.backward
        return cls(
            schedule,
            kind,
            stages,
            Panel("overlapped", play(kind.program, *halves, costs)),
            Panel("serial", play(serial_program(kind.kind, *halves), *halves, costs)),
        )

    @property
    def panels(self) -> tuple[Panel, Panel]:
        return self.overlapped, self.serial

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Compute, and the lanes that carry anything."""
        used = {span.task.lane for span in self.overlapped.played.spans if span.time > 0}
        return (Lane.COMPUTE, *(lane for lane in EXCHANGE_LANES if lane in used))

    @property
    def makespan(self) -> float:
        return max(panel.played.duration for panel in self.panels)

    @cached_property
    def usual(self) -> float:
        """The time of a task that is longer than most, small hops left aside; 0 where none takes any."""
        shown = [span for lane in self.lanes if lane is not Lane.NODE for span in self.overlapped.spans(lane)]
        times = sorted(span.time for span in shown)
        return times[len(times) * 2 // 3] if times else 0.0

    @property
    def title(self) -> str:
        halves = zip(self.kind.kind, self.stages, strict=False)  # a cell of one op has its stage twice
        return f"{self.schedule}: inside {' & '.join(f'{kind} on stage {stage}' for kind, stage in halves)}"

    @property
    def facts(self) -> list[str]:
        found = self.kind.prediction
        bound = "its longest chain" if found.bound == "chain" else found.bound
        return [
            f"{quantity(found.duration)} overlapped, {quantity(self.serial.played.duration)} serial",
            f"compute {quantity(found.compute)}",
            *(
                f"{lane} {quantity(use.busy)}, exposed {quantity(use.exposed)}"
                for lane, use in zip(EXCHANGE_LANES, found.lanes, strict=True)
                if use.busy
            ),
            f"hidden {100 * found.hidden:.1f} %",
            f"bound by {bound}",
        ]


def hover(span: StepSpan) -> str:
    """``0.experts, forward, 20 to 40 (20)``."""
    return f"{node_name(span)}, {PASSES[span.task.half]}, {interval(span)}"


def interval(span: StepSpan) -> str:
    return f"{quantity(span.begin)} to {quantity(span.end)} ({quantity(span.time)})"


def node_name(span: StepSpan) -> str:
    """``0.experts``, ``1.dispatch.rail``: the name of the task without its half."""
    rest = span.task.name.partition(".")[2]
    return rest.removesuffix({Half.BACKWARD: ".I", Half.WEIGHT: ".W", Half.RECOMPUTE: ".again"}.get(span.task.half, ""))


def labels(span: StepSpan) -> Iterator[str]:
    """What may stand in the box of a task, the longest first: ``0 experts``, ``0 exp``, ``0``."""
    layer, dot, rest = node_name(span).partition(".")
    role = rest.removesuffix(f".{span.task.lane}") if dot else layer
    number = f"{layer} " if dot else ""
    for length in (len(role), 3, 1):
        yield number + role[:length]
    if dot:
        yield layer


def layer_of(span: StepSpan) -> int:
    """The layer's number; 0 where the name has none."""
    layer = node_name(span).partition(".")[0]
    return int(layer) if layer.isdecimal() else 0
