"""Cell programs: the order of micro-steps inside one cell, the same on every rank of an expert group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from schedc.source import NOWHERE, Source, Span


class Half(StrEnum):
    """Which pass over the graph a step belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs; those of weights are left to WEIGHT."""
    WEIGHT = "weight"
    RECOMPUTE = "again"
    """Recomputation: the forward of the microbatch whose backward is due."""


class Action(StrEnum):
    RUN = "run"
    """Compute a segment."""
    START = "start"
    """Start an exchange; returns at once."""
    WAIT = "wait"
    """Wait for an exchange that was started; its outputs may be used afterwards."""


class Step(NamedTuple):
    """One micro-step. node: index in the forward's shape for the half FORWARD, else in the backward's shape."""

    action: Action
    half: Half
    node: int


class Edge(NamedTuple):
    """Where a half (FORWARD or BACKWARD) needs or completes a message.

    opens: the half begins and needs its message from another stage. Else its own message to another stage is complete.
    """

    half: Half
    opens: bool


@dataclass(frozen=True)
class CellProgram:
    """The micro-steps of one cell of ``kind`` (`KINDS`).

    Exchanges of one lane run one at a time, in the order in which they start.
    activation_at, gradient_at: [steps] number of steps after which the forward's outputs, and the gradients of the
        backward's inputs, are complete; -1 where the cell has none.
    opens_late: each half needs its message right before its own first step; else before the first step of the cell.
    """

    steps: tuple[Step, ...]
    activation_at: int
    gradient_at: int
    kind: str
    opens_late: bool = True

    @cached_property
    def parts(self) -> tuple[Step | Edge, ...]:
        """The steps, and between them the edges of both halves."""
        complete = dict(zip(MESSAGED, (self.activation_at, self.gradient_at), strict=True))
        parts: list[Step | Edge] = []
        unopened = [half for half in MESSAGED if complete[half] >= 0]

        def open_(*halves: Half) -> None:
            for half in halves:
                if half in unopened:
                    unopened.remove(half)
                    parts.append(Edge(half, opens=True))

        if not self.opens_late:
            open_(*MESSAGED)
        for number in range(len(self.steps) + 1):
            for half in MESSAGED:
                if complete[half] == number:
                    open_(half)  # a half without steps, as on a stage of paddings, passes its message on
                    parts.append(Edge(half, opens=False))
            if number < len(self.steps):
                open_(self.steps[number].half)
                parts.append(self.steps[number])
        return tuple(parts)


MESSAGED = (Half.FORWARD, Half.BACKWARD)
"""The halves with messages: activations for FORWARD, gradients for BACKWARD."""


KINDS = ("F", "I", "B", "W", "R", "FB", "FI")
"""Kinds of cells: one op, or a forward with a full backward or an input gradient. An R has the half RECOMPUTE alone."""


@dataclass(frozen=True)
class PlanOrder:
    """An order by hand for each pair of layers: names such as ``B.experts.I`` or ``F.dispatch``, for both lanes.

    Layer i of the forward pairs with the i-th layer from the end of the backward. source, span: place in the plan.
    """

    compute: tuple[str, ...]
    communication: tuple[str, ...]
    source: Source | None = None
    span: Span = NOWHERE
