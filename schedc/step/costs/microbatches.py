"""Factors of microbatches: how much longer than the costs say the ops of each take, on all stages or by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError
from schedc.ir.arrays import Floats
from schedc.ir.schedule import Schedule
from schedc.source import Source
from schedc.step.costs.checks import LARGEST, problem

Factors = tuple[float, ...] | tuple[tuple[float, ...], ...]
"""One factor per microbatch, or one such row per stage; empty where all microbatches cost the same."""

KEY = "microbatches"
_EXAMPLE = "microbatches = [1.0, 0.7]"


@dataclass(frozen=True, eq=False)
class MicrobatchFactors:
    """Factors of a known number of stages. table: [1 or stages, microbatches], over the costs of the ops."""

    table: Floats
    source: Source | None = field(default=None, repr=False)

    @classmethod
    def of(cls, factors: Factors, stages: int, source: Source | None) -> MicrobatchFactors | None:
        """The factors; None where all microbatches cost the same. Raises `DiagnosticError` (S404, S412)."""
        if not factors:
            return None
        rows: list[Any] = list(factors) if isinstance(factors[0], tuple) else [factors]
        wrong = next((wrong for row in rows if (wrong := _wrong_row(row))), "")
        if wrong or len({len(row) for row in rows}) > 1:
            raise DiagnosticError([_refused(wrong or "rows of other lengths", source)])
        if len(rows) not in (1, stages):
            message = f"`{KEY}` has rows for {len(rows)} stages, the schedule has {stages}"
            raise DiagnosticError([problem("S404", message, source, KEY, help="give a row per stage, or one for all")])
        return cls(np.array(rows, np.float64), source)

    def of_schedule(self, schedule: Schedule) -> Floats:
        """[1 or stages, microbatches] the factors of a schedule. Raises `DiagnosticError` (S412) for another number."""
        given, wanted = self.table.shape[1], schedule.microbatches
        if given != wanted:
            message = f"`{KEY}` has factors of {given} microbatches, `{schedule.name}` has {wanted} at this size"
            help = "give one factor per microbatch; of a microbatch in segments, one per segment"
            raise DiagnosticError([problem("S412", message, self.source, KEY, help=help)])
        return self.table


def read_microbatches(value: object, source: Source) -> tuple[Factors, list[Diagnostic]]:
    """The factors of a parsed value of the key, and findings (S412): a list of numbers, or a list of such lists."""
    rows: list[Any] = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    wrong = next((wrong for row in rows if (wrong := _wrong_row(row))), "")
    if wrong:
        return (), [_refused(wrong, source)]
    factors = tuple(tuple(float(factor) for factor in row) for row in rows)
    return (factors if rows is value else factors[0]), []


def _wrong_row(row: object) -> str:
    """What is wrong with a row of factors; empty if nothing is."""
    if not isinstance(row, Sequence) or isinstance(row, str) or not row:
        return f"{row!r} in place of a list of numbers"
    for factor in row:
        if isinstance(factor, bool) or not isinstance(factor, int | float | np.number):
            return f"{factor!r}, which is no number"
        if not 0 <= factor <= LARGEST:  # also false of a NaN
            return f"{factor!r}; a factor is a number from 0 to {LARGEST:.0e}"
    return ""


def _refused(wrong: str, source: Source | None) -> Diagnostic:
    return problem("S412", f"`{KEY}` has {wrong}", source, KEY, help=f"write {_EXAMPLE}, or a list of such lists")


def write_microbatches(factors: Factors) -> list[str]:
    """The line of the key, in front of all tables; none without factors."""

    def numbers(row: Sequence[Any]) -> str:
        return f"[{', '.join(repr(float(factor)) for factor in row)}]"

    if not factors:
        return []
    rows = [row for row in factors if isinstance(row, tuple)]
    return [f"{KEY} = [{', '.join(map(numbers, rows))}]" if rows else f"{KEY} = {numbers(factors)}"]
