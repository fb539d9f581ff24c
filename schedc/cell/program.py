"""Cell programs: the order of micro-steps inside one cell, the same on every rank of an expert group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeVar

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


class CellStep(NamedTuple):
    """One micro-step. node: index in the graph on which the half runs (`HALVES`)."""

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

    Exchanges of one lane run one at a time, in the order of their starts.
    activation_at, gradient_at: [steps] number of steps after which the forward's outputs, and the gradients of the
        backward's inputs, are complete; -1 where the cell has none.
    opens_late: each half needs its message right before its own first step; else before the first step of the cell.
    """

    steps: tuple[CellStep, ...]
    activation_at: int
    gradient_at: int
    kind: str
    opens_late: bool = True

    @cached_property
    def parts(self) -> tuple[CellStep | Edge, ...]:
        """The steps, and between them the edges of both halves."""
        complete = dict(zip(MESSAGED, (self.activation_at, self.gradient_at), strict=True))
        parts: list[CellStep | Edge] = []
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


_BACK = (Half.RECOMPUTE, Half.BACKWARD)

HALVES: Mapping[str, tuple[tuple[Half, ...], tuple[Half, ...]]] = {
    "F": ((Half.FORWARD,), ()),
    "I": ((), _BACK),
    "B": ((), (*_BACK, Half.WEIGHT)),
    "W": ((), (Half.WEIGHT,)),
    "R": ((), (Half.RECOMPUTE,)),
    "FB": ((Half.FORWARD,), (*_BACK, Half.WEIGHT)),
    "FI": ((Half.FORWARD,), _BACK),
    "FW": ((Half.FORWARD,), (Half.WEIGHT,)),
    "IW": (_BACK, (Half.WEIGHT,)),
}
"""By kind of cell, the halves that it may have: those on the first of its two graphs, and those on the second.

A kind is one op, or the two ops of an overlapped pair, each on the graph of its stage. The first graph is that of a
forward, or of the I beside a W; all others are the second."""

KINDS = tuple(HALVES)


Graph = TypeVar("Graph")


def graph_of(kind: str, half: Half, first: Graph, second: Graph) -> Graph:
    """The one of the two graphs of a cell, or of what belongs to them, on which ``half`` runs."""
    return first if half in HALVES[kind][0] else second


@dataclass(frozen=True)
class PlanOrder:
    """An order by hand for each pair of layers: names such as ``B.experts.I`` or ``F.dispatch``, for both lanes.

    Layer i of the forward pairs with the i-th layer from the end of the backward. source, span: place in the plan.
    """

    compute: tuple[str, ...]
    communication: tuple[str, ...]
    source: Source | None = None
    span: Span = NOWHERE
