"""The candidates of `balance auto` and of `slices auto`, with their prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schedc.ir.plan import Plan

SAME_STEP = 1e-9
"""Steps that differ by less, as a part of them, take as long as each other."""


@dataclass(frozen=True)
class PricedCandidate:
    """What a candidate costs, or why it is none.

    makespan: of the step, in the unit of the costs. slots: bytes of copies on the fullest rank; 0 where they are not
    known. copies: as of `copies_facts`.
    """

    name: str
    plan: Plan
    makespan: float = float("inf")
    slots: float = 0.0
    copies: dict[str, Any] | None = None
    refused: str = ""


@dataclass(frozen=True)
class ChosenBalance:
    """The candidates of `balance auto`, and the one with the shortest step; no candidates without a record."""

    candidates: tuple[PricedCandidate, ...]
    chosen: PricedCandidate


@dataclass(frozen=True)
class PricedSlices:
    """A number of slices for each stage, with its step.

    makespan: in the unit of the costs. alone, pairs: share of the exchanges that cells of one op hide, and pairs; None
    where there is no such cell. refused: why the plan excludes it.
    """

    plan: Plan
    makespan: float = float("inf")
    alone: float | None = None
    pairs: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class ChosenSlices:
    """The candidates, whole microbatches first, and the one with the shortest step; no candidates without factors."""

    candidates: tuple[PricedSlices, ...]
    chosen: PricedSlices
