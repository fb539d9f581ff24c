"""Predicts measured rows with a fit: seconds per step and the memory of the fullest rank, beside the measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from schedc.planner.fit.estimate import at
from schedc.planner.fit.rows import MeasuredRow, MeasuredRows
from schedc.planner.fit.units import check_units
from schedc.planner.times.memory import rank_memory
from schedc.planner.times.step import step_times
from schedc.planner.times.table import RunTable


@dataclass(frozen=True)
class PredictedRow:
    """A row with its prediction.

    step_s: seconds. memory_bytes: that of the fullest rank in bytes; None where the row measured none.
    """

    row: MeasuredRow
    step_s: float
    memory_bytes: float | None

    @property
    def time_error(self) -> float:
        """Predicted over measured step, less one: a share."""
        return self.step_s / self.row.step_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured memory, less one: a share; None where the row measured none."""
        return None if self.memory_bytes is None else self.memory_bytes / self.row.peak_bytes - 1.0


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of some predictions, in percent: mean of their absolute values, mean, and the largest absolute value."""

    rows: int
    mape_pct: float
    bias_pct: float
    worst_pct: float

    @classmethod
    def of(cls, errors: Iterable[float | None]) -> ErrorSummary | None:
        """The summary of the errors that are there; None without any."""
        percent = 100.0 * np.array([error for error in errors if error is not None])
        if not percent.size:
            return None
        size = np.abs(percent)
        return cls(percent.size, float(size.mean()), float(percent.mean()), float(size.max()))


def predict(measured: MeasuredRows, constants: dict[str, float]) -> list[PredictedRow]:
    """The predictions of all rows. Constants that are not given stay at their priors' medians.

    Raises as `check_units`.
    """
    check_units(measured)
    rows = measured.rows
    steps = step_times(RunTable([row.run for row in rows]), at(constants)).step[:, 0]
    memory = [float(rank_memory(row.run).total.max()) if row.peak_bytes else None for row in rows]
    return [PredictedRow(*each) for each in zip(rows, steps.tolist(), memory, strict=True)]


def by_schedule(rows: Iterable[PredictedRow]) -> dict[str, ErrorSummary]:
    """Errors of the step times, by the name of the schedule in the rows' source."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.row.called].append(row.time_error)
    return {name: summary for name, errors in groups.items() if (summary := ErrorSummary.of(errors))}
