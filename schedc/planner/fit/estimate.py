"""Estimates constants from measured steps: the most likely ones under log-normal priors, by least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.planner.fit.calibration import Calibration
from schedc.planner.price.priced import step_seconds
from schedc.planner.space.schedules import open_choice
from schedc.planner.times.constants import (
    BY_NAME,
    CONSTANTS,
    OWNERS,
    SUSTAINED,
    ConstantVectors,
    FitConstant,
    sustained,
)
from schedc.planner.times.spread import ROW_SPREAD, UNDECIDED
from schedc.planner.times.table import RunTable

_LEAST_SPREAD = 0.01
"""Logarithm by which steps differ at least: printed figures are rounded, and runs of one day differ by a percent."""

_MEDIAN = 0.6745
"""The median of the absolute values of a normal variable, in its standard deviations."""

_STEP = 1e-4
"""Derivatives are those from below: a share of a link of 1 has none from above."""

_AS_ROWS = 2.0
"""Rows with the usual spread that count beside those of a fit: the spread of a few rows is hardly known."""

_FARTHEST = 8.0
"""Largest distance of a constant from its median, in widths of the prior."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """Constants, and how far the rows decide them.

    constants: the estimated ones by name. position: [constants] widths of the prior from its median. information:
    [constants, constants] what the rows say, as the inverse of a covariance in widths of the priors. spread: logarithm
    by which measured steps differ from predictions. at_bound: names of constants that stopped at a bound.
    at_prior: names of constants that the rows do not inform. decided: how many constants the rows decide, one that they
    decide by half as a half. rows: how many.
    """

    constants: dict[str, float]
    position: Floats
    information: Floats
    spread: float
    at_bound: tuple[str, ...]
    at_prior: tuple[str, ...]
    decided: float
    rows: int = 0

    @property
    def row_spread(self) -> float:
        """Logarithm by which the next row differs: the spread of these rows with two usual rows beside them."""
        free = max(0.0, self.rows - self.decided)
        return float(np.sqrt((_AS_ROWS * ROW_SPREAD**2 + free * self.spread**2) / (_AS_ROWS + free)))

    def covariance(self, factor: float = 1.0) -> Floats:
        """[constants, constants] covariance, in widths of the priors, if rows differ by ``factor`` times their spread.

        None is wider than its prior. A constant of which the rows say nothing is as wide, and independent.
        """
        return np.asarray(np.linalg.inv(np.eye(self.position.size) + self.information / factor**2))


class Estimator:
    """Estimates the constants that matter for some rows, from all of these rows or from a part of them.

    calibration: times of parts, which count in every estimate.
    """

    def __init__(self, table: RunTable, step_s: Floats, calibration: Calibration | None = None) -> None:
        self.table, self.step_s = table, step_s
        self.calibration = calibration or Calibration(())
        self.constants = needed(RunTable([*table.each, *self.calibration.table.each]))
        self.names = [constant.name for constant in self.constants]
        self.median = np.array([constant.median for constant in self.constants])
        self.width = np.array([constant.width for constant in self.constants])
        most = np.array([constant.most for constant in self.constants])
        self.upper = np.minimum(np.log(most / self.median) / self.width, _FARTHEST) + 1e-9

    def vectors(self, positions: Floats) -> ConstantVectors:
        """Constants at [K, names] positions: widths of the prior from its median."""
        return ConstantVectors.of(self.names, self.median * np.exp(np.atleast_2d(positions) * self.width))

    def predict(self, position: Floats) -> Floats:
        """[rows] seconds per step."""
        return self.steps(position)[:, 0]

    def predict_times(self, position: Floats) -> Floats:
        """[times] seconds of what was calibrated."""
        return self.calibration.predict(self.vectors(position))[:, 0]

    def steps(self, positions: Floats) -> Floats:
        """[rows, K] seconds per step."""
        if not len(self.table):
            return np.zeros((0, np.atleast_2d(positions).shape[0]))
        return step_seconds(self.table, self.vectors(positions))

    def _times(self, positions: Floats) -> Floats:
        """[times, K] residuals of what was calibrated, in their spreads."""
        calibration = self.calibration
        ratios = np.log(calibration.predict(self.vectors(positions))) - np.log(calibration.seconds)[:, None]
        return np.asarray(ratios / calibration.spreads[:, None])

    def estimate(self, rows: Int64, start: Floats | None = None) -> Estimate:
        """The constants from some rows, twice: the second time with the spread that the first one leaves.

        Rows that agree within a percent say more beside the priors than rows that differ by a factor.
        rows: [n] their numbers. start: position to begin at; by default the priors' medians.
        """
        first = self.at_spread(rows, ROW_SPREAD, start)
        return self.at_spread(rows, self.spread_of(rows, first), first.position)

    def spread_of(self, rows: Int64, estimate: Estimate) -> float:
        """The spread of rows about an estimate from them: that of most, with what the constants took away.

        rows: [n] their numbers. The spread is a logarithm.
        """
        free = rows.size - estimate.decided
        if free < 1.0:
            return ROW_SPREAD
        typical = np.median(np.abs(np.log(self.predict(estimate.position)[rows] / self.step_s[rows]))) / _MEDIAN
        return float(np.clip(typical * np.sqrt(rows.size / free), _LEAST_SPREAD, ROW_SPREAD))

    def at_spread(self, rows: Int64, spread: float, start: Floats | None = None) -> Estimate:
        """The constants from rows that differ from good predictions by a logarithm of ``spread``.

        rows: [n] their numbers. start: position to begin at; by default the priors' medians.
        """
        from scipy.optimize import least_squares

        measured = np.log(self.step_s[rows])[:, None]

        def residuals(positions: Floats) -> Floats:
            steps = np.log(self.steps(positions)[rows]) - measured
            return _soft(np.vstack([steps / spread, self._times(positions)]))

        def all_residuals(position: Floats) -> Floats:
            return np.concatenate([residuals(position)[:, 0], position])

        def jacobian(position: Floats) -> Floats:
            values = residuals(np.vstack([position, position - _STEP * np.eye(position.size)]))
            return np.vstack([(values[:, :1] - values[:, 1:]) / _STEP, np.eye(position.size)])

        begin = np.zeros(len(self.names)) if start is None else start
        solution = least_squares(
            all_residuals,
            np.minimum(begin, self.upper - 1e-6),
            jac=jacobian,
            bounds=(np.full(begin.size, -_FARTHEST), self.upper),
            xtol=1e-5,
            ftol=1e-5,
            max_nfev=40,
        )
        return self._summary(solution.x, solution.jac, spread, rows.size)

    def _summary(self, position: Floats, jacobian: Floats, spread: float, rows: int) -> Estimate:
        information = jacobian.T @ jacobian - np.eye(position.size)
        width = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
        at_bound = (position > self.upper - 0.01) | (position < 0.01 - _FARTHEST)
        values = self.median * np.exp(position * self.width)
        return Estimate(
            dict(zip(self.names, values.tolist(), strict=True)),
            position,
            information,
            spread,
            tuple(name for name, there in zip(self.names, at_bound, strict=True) if there),
            tuple(name for name, free in zip(self.names, width > UNDECIDED, strict=True) if free),
            float((1.0 - width**2).sum()),
            rows,
        )


def _soft(scaled: Floats) -> Floats:
    """Soft L1: quadratic up to a spread, then linear. Published rows have anomalies of a factor of two."""
    return np.asarray(np.sign(scaled) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0)))


def needed(table: RunTable) -> Sequence[FitConstant]:
    """The constants that some row depends on."""
    runs = table.each
    features = {
        "": True,
        "tp": any(run.axes.tp > 1 for run in runs),
        "tp_nodes": bool((table.tp > table.near).any()),
        "pp": any(run.axes.pp > 1 for run in runs),
        "dp": bool((table.replicas * table.tp > table.near).any()),
        "unaligned": any(run.model.attention.qk_dim % 8 for run in runs),
        "split": any(open_choice(run.axes.schedule).splits for run in runs),
        "gemm": any(run.problem.precision in ("bf16", "fp16") for run in runs),
        "fp8": any(run.problem.precision == "fp8" for run in runs),
        "fp4": any(run.problem.precision == "fp4" for run in runs),
        "moe": any(run.model.moe for run in runs),
        "ep": any(run.axes.ep > 1 for run in runs),
        "cp": any(run.axes.cp > 1 for run in runs),
        "block_scales": bool(table.flag("block_scales").any()),
        "overlap": bool(table.overlap.any()),
        "chunked_tp": bool((table.flag("chunked_tp")[:, 0] & (table.tp > 1)).any()),
        "graphed": bool(table.flag("attention_graphs").any()),
    }
    devices = sorted({run.cluster.device.name for run in runs})
    clocks = [sustained(device) for device in devices] if len(devices) > 1 else []
    wanted = [constant for constant in CONSTANTS if constant.needs is not None and features[constant.needs]] + clocks
    return sorted(wanted, key=lambda constant: OWNERS.index(constant.owner))


def at(values: dict[str, float]) -> ConstantVectors:
    """One vector of constants; constants outside of ``values`` stay at their priors' medians."""
    names = [name for name in values if name in BY_NAME or name.startswith(SUSTAINED)]
    return ConstantVectors.of(names, np.array([[values[name] for name in names]]))
