"""Makes a fit of measured rows: constants, and how far predictions are off with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from schedc.ir.arrays import Bools, Floats
from schedc.planner.fit.calibration import Calibration
from schedc.planner.fit.estimate import Estimator
from schedc.planner.fit.fitted import SEEN_AXES, Fit, SeenRanges
from schedc.planner.fit.left_out import FACTOR
from schedc.planner.fit.rows import MeasuredRows
from schedc.planner.fit.units import check_units
from schedc.planner.fit.validate import Validation, errors, validate
from schedc.planner.times.problem import Stack, TrainingRun
from schedc.planner.times.spread import triangle_of
from schedc.planner.times.table import RunTable


@dataclass(frozen=True, eq=False)
class FitResult:
    """A fit with its errors.

    ratios: [rows] predicted over measured, less one. validation: None if none was asked for. times: [times] the same of
    the calibrated ones.
    """

    fit: Fit
    measured: MeasuredRows
    ratios: tuple[float, ...]
    validation: Validation | None
    times: tuple[float, ...] = ()

    @property
    def mape_pct(self) -> float:
        return 100.0 * _mean(np.abs(self.ratios))

    @property
    def bias_pct(self) -> float:
        return 100.0 * _mean(np.array(self.ratios))

    @property
    def times_mape_pct(self) -> float:
        return 100.0 * _mean(np.abs(self.times))

    @property
    def within_10_pct(self) -> float:
        """Share of rows, in percent, whose prediction is within a tenth of the measurement."""
        return 100.0 * _mean(np.abs(self.ratios) <= 0.1)


_OF_PLANS = ("recomputes_scores", "free_steps")
"""Traits that follow from the axes of a plan."""


def _seen_ranges(runs: Sequence[TrainingRun]) -> SeenRanges:
    """The ranges of the sizes of runs."""
    values = {axis: [getattr(run.axes, axis) for run in runs] for axis in SEEN_AXES}
    return {axis: (min(sizes), max(sizes)) for axis, sizes in values.items() if sizes}


def _software(runs: Sequence[TrainingRun]) -> dict[str, bool | int]:
    """Traits of the software that are the same in all runs, where they are not the usual ones of a search."""
    traits = {each.name: {getattr(run.problem.stack, each.name) for run in runs} for each in fields(Stack)}
    same = {name: next(iter(values)) for name, values in traits.items() if len(values) == 1}
    return {name: value for name, value in same.items() if name not in _OF_PLANS and value != getattr(Stack(), name)}


def _mean(values: Floats | Bools) -> float:
    return float(values.mean()) if values.size else 0.0


def fit_rows(measured: MeasuredRows, name: str, cross_validate: bool) -> FitResult:
    """Fits constants to rows. Needs scipy. Raises as `check_units`."""
    rows = measured.rows
    calibration = Calibration(measured.calibrated)
    estimator = Estimator(RunTable([row.run for row in rows]), np.array([row.step_s for row in rows]), calibration)
    check_units(measured, estimator.predict(np.zeros(len(estimator.names))))
    whole = estimator.estimate(np.arange(len(rows)))
    validation = validate(estimator, rows, whole) if cross_validate and rows else None
    factor = round(validation.factor if validation else FACTOR, 3)
    fit = Fit(
        name,
        tuple(sorted(measured.devices)),
        tuple(sorted(measured.precisions)),
        len(rows),
        hashlib.sha256(measured.source.text.encode()).hexdigest()[:16],
        whole.constants,
        round(validation.cv_mape_pct, 3) if validation else 0.0,
        round(validation.held_pct, 1) if validation else 0.0,
        round(validation.width_pct, 1) if validation else 0.0,
        whole.at_bound,
        whole.at_prior,
        seen=_seen_ranges(measured.runs),
        calibrated=len(calibration),
        spread=round(factor * whole.row_spread, 4),
        factor=factor,
        triangle=triangle_of(whole.covariance(factor)),
        software=_software(measured.runs),
    )
    ratios = errors(estimator, whole.position)
    times = estimator.predict_times(whole.position) / calibration.seconds - 1.0
    return FitResult(fit, measured, tuple(ratios.tolist()), validation, tuple(times.tolist()))
