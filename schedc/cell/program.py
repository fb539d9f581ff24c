"""Cell programs: the order of micro-steps inside one cell, the same on every rank of an expert group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from schedc.source import NOWHERE, Source, Span


class Half(StrEnum):
    """Which pass over the graph a step belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs; those of weights are left to WEIGHT."""
    WEIGHT = "weight"
    AGAIN = "again"
    """The forward of the backward's microbatch once more: recomputation."""


class Action(StrEnum):
    RUN = "run"
    """Compute a segment."""
    START = "start"
    """Start an exchange; returns at once."""
    WAIT = "wait"
    """Wait for an exchange that was started; its outputs may be used afterwards."""


class Step(NamedTuple):
    """One micro-step. ``node``: of the forward's shape in the half FORWARD, else of the backward's."""

    action: Action
    half: Half
    node: int


@dataclass(frozen=True)
class CellProgram:
    """The micro-steps of one cell of ``kind`` (`KINDS`).

    Exchanges of one lane run one at a time, in the order in which they are started.
    activation_at, gradient_at: the outputs of the forward, the gradients of the inputs, are complete after so many
        steps; -1 where the cell has none.
    """

    steps: tuple[Step, ...]
    activation_at: int
    gradient_at: int
    kind: str


KINDS = ("F", "I", "B", "W", "R", "FB", "FI")
"""The kinds of cells: one op, or a forward with a full backward or an input gradient. An R is the half AGAIN alone."""


@dataclass(frozen=True)
class PlanOrder:
    """An order by hand, for each pair of layers: the names of both lanes, as ``B.experts.I`` or ``F.dispatch``.

    Layer i of the forward is with the i-th layer from the end of the backward. ``source``, ``span``: the plan.
    """

    compute: tuple[str, ...]
    communication: tuple[str, ...]
    source: Source | None = None
    span: Span = NOWHERE
