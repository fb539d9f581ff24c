"""Costs of the rows of a batch, a text with a line per row, and the factors of microbatches that follow from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.ir.arrays import Floats
from schedc.source import Source
from schedc.step.costs.checks import LARGEST, LONGEST

_ONE = "write one number from 0 per line, or one per stage; `#` begins a comment"


def load_row_costs(path: str | Path) -> tuple[Source, Floats]:
    """The text of a file and [rows, 1 or stages] its costs, of any unit.

    Raises `DiagnosticError`: S405 for a file that cannot be read, S412 for what is no cost.
    """
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DiagnosticError([Diagnostic("S405", f"cannot read the costs of rows `{path}`: {error}")]) from error
    return (source := Source(str(path), text)), read_row_costs(source)


def read_row_costs(source: Source) -> Floats:
    """[rows, 1 or stages] the costs of a text. Raises `DiagnosticError` (S412) at the first line that is wrong."""
    rows: list[list[float]] = []
    start = 0
    for line in source.lines:
        written = line.partition("#")[0]
        if written.strip():
            row = _numbers(written)
            if wrong := _wrong(row, rows):
                place = Label(source.span_at(start, start + max(1, len(written.rstrip()))))
                raise DiagnosticError([Diagnostic("S412", wrong, place, help=_ONE, source=source)])
            rows.append(row)
        start += len(line) + 1
    if not rows or not any(map(any, rows)):
        raise DiagnosticError([_refusal(f"{len(rows)} rows, and no cost above 0", source)])
    return np.array(rows, np.float64)


def _numbers(line: str) -> list[float]:
    """The numbers of a line, apart from each other by spaces or commas; empty where something is no number."""
    try:
        return [float(part) for part in line.replace(",", " ").split()]
    except ValueError:
        return []


def _wrong(row: list[float], before: list[list[float]]) -> str:
    if not row:
        return "no cost of a row"
    if not all(0 <= cost <= LARGEST for cost in row):
        return f"a cost is a number from 0 to {LARGEST:.0e}"
    if before and len(row) != len(before[0]):
        return f"{len(row)} costs, and {len(before[0])} in the lines before"
    return f"more than {LONGEST:,} rows" if len(before) == LONGEST else ""


def _refusal(message: str, source: Source) -> Diagnostic:
    return Diagnostic("S412", message, Label(source.span_at(0, len(source.lines[0]))), help=_ONE, source=source)


def microbatch_costs(rows: Floats, source: Source, microbatches: int, stages: int) -> Floats:
    """[1 or stages, microbatches] costs of microbatches over their mean: a batch is cut into equal numbers of rows.

    rows: as `read_row_costs` gives them. Raises `DiagnosticError` (S412) for rows that the step cannot have.
    """
    count, kinds = rows.shape
    if count % microbatches:
        message = f"{count} rows, and the step has {microbatches} microbatches of equally many rows"
        raise DiagnosticError([_refusal(message, source)])
    if kinds not in (1, stages):
        raise DiagnosticError([_refusal(f"{kinds} costs in a line, the schedule has {stages} stages", source)])
    costs = rows.reshape(microbatches, -1, kinds).sum(axis=1).T
    return np.ascontiguousarray(costs / costs.mean())
