"""Predicts measured rows with a fit: seconds per step and the memory of the fullest rank, beside the measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np

from schedc.planner.fit.estimate import at
from schedc.planner.fit.fitted import Fit, beyond
from schedc.planner.fit.rows import MeasuredRow, MeasuredRows
from schedc.planner.fit.units import check_units
from schedc.planner.price.files import planned_run
from schedc.planner.price.intervals import StepInterval, step_intervals
from schedc.planner.price.part_table import PartTable
from schedc.planner.price.priced import price_plan
from schedc.planner.times.constants import on_device
from schedc.planner.times.problem import TrainingRun
from schedc.planner.times.spread import ConstantSpread
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
    runs = [_under(row.run, constants) for row in measured.rows]
    table = PartTable.of_runs(RunTable(runs), at(constants))
    plans = [price_plan(planned_run(run, table, number)) for number, run in enumerate(runs)]
    check_units(measured, np.array([plan.step for plan in plans]))
    return [
        PredictedRow(row, plan.step, plan.needed if row.peak_bytes else None)
        for row, plan in zip(measured.rows, plans, strict=True)
    ]


@dataclass(frozen=True)
class RowInterval:
    """How sure the prediction of a row is.

    of_step: its interval. known: how sure the constants are on its device. beyond: sizes that no row of the fit has.
    """

    of_step: StepInterval
    known: ConstantSpread
    beyond: tuple[str, ...] = ()


def row_intervals(measured: MeasuredRows, fit: Fit | None) -> list[RowInterval]:
    """The intervals of the predictions of all rows; without a fit those of the priors."""
    runs = [row.run for row in measured.rows]
    devices = [run.cluster.device.name for run in runs]
    intervals: dict[int, RowInterval] = {}
    for device in dict.fromkeys(devices):
        known = (fit.on(device).known if fit else None) or ConstantSpread.of_priors()
        own = [number for number, each in enumerate(devices) if each == device]
        for number, interval in zip(own, step_intervals([runs[each] for each in own], known), strict=True):
            sizes = tuple(beyond(fit.seen, asdict(runs[number].axes))) if fit else ()
            intervals[number] = RowInterval(interval, known, sizes)
    return [intervals[number] for number in range(len(runs))]


def _under(run: TrainingRun, constants: dict[str, float]) -> TrainingRun:
    """The run under the constants of its device."""
    return replace(run, problem=replace(run.problem, constants=on_device(constants, run.cluster.device.name)))


def by_schedule(rows: Iterable[PredictedRow]) -> dict[str, ErrorSummary]:
    """Errors of the step times, by the name of the schedule in the rows' source."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.row.called].append(row.time_error)
    return {name: summary for name, errors in groups.items() if (summary := ErrorSummary.of(errors))}
