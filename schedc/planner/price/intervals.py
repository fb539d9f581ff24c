"""Intervals of steps: how far a measured step may be from its prediction, and which constants make it so far.

The variance of the logarithm of a step is that of rows, and that of the constants through what the step changes by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.price.priced import step_seconds
from schedc.planner.times.constants import CONSTANTS, NAMES, ConstantVectors
from schedc.planner.times.problem import TrainingRun
from schedc.planner.times.skew import LOADS_NAME, LOADS_WIDTH
from schedc.planner.times.spread import ConstantSpread
from schedc.planner.times.table import RunTable

SHARE = 0.9
"""Share of steps that an interval holds."""
REACH = NormalDist().inv_cdf(0.5 + 0.5 * SHARE)
"""Standard deviations from the middle of a normal variable to the ends of the interval."""

_COUNTS = 0.05
"""Least share of a variance with which a constant is named."""


@dataclass(frozen=True)
class StepInterval:
    """The 90 % interval of a step.

    factor: the interval is from the step over it to the step times it. rows: share of the variance that is of rows.
    shares: of the variance, by constants that count, largest first.
    """

    factor: float
    rows: float
    shares: tuple[tuple[str, float], ...]

    @property
    def width_pct(self) -> float:
        """How far the upper end is above the step, in percent."""
        return 100.0 * (self.factor - 1.0)

    def ends(self, step: float) -> tuple[float, float]:
        """The ends for a step, in its unit."""
        return step / self.factor, step * self.factor


def step_intervals(runs: Sequence[TrainingRun], known: ConstantSpread) -> list[StepInterval]:
    """The intervals of the steps of runs on one device, under what is known of the constants.

    Where the problem of the runs assumes a spread of loads, it counts like a constant.
    """
    table, problem = RunTable(runs), runs[0].problem
    middle, reach = np.log(known.median), np.sqrt(np.diag(known.logs))
    upper = np.maximum(np.log([each.most for each in CONSTANTS]), middle)
    if problem.assumed:
        middle, reach = np.append(middle, np.log(problem.spread)), np.append(reach, LOADS_WIDTH)
        upper = np.append(upper, np.inf)

    def log_steps(logs: Floats) -> Floats:
        constants = ConstantVectors.of(NAMES, np.exp(logs[:, : len(NAMES)]))
        loads = np.exp(logs[:, len(NAMES) :]).T if problem.assumed else None
        return np.log(step_seconds(table, replace(constants, loads=loads)))

    return [_interval(effect, known) for effect in log_effects(log_steps, middle, reach, upper)]


def _interval(effect: Floats, known: ConstantSpread) -> StepInterval:
    """effect: [constants] what the logarithm of the step changes by; behind them, that of a spread of loads."""
    own, loads = effect[: len(NAMES)], effect[len(NAMES) :]
    parts = np.append(own * (known.logs @ own), (LOADS_WIDTH * loads) ** 2)
    variance = known.rows**2 + parts.sum()
    names = (*NAMES, LOADS_NAME)[: parts.size]
    shares = sorted(zip(names, (parts / variance).tolist(), strict=True), key=lambda each: -each[1])
    named = tuple(each for each in shares if each[1] >= _COUNTS)
    return StepInterval(float(np.exp(REACH * np.sqrt(variance))), known.rows**2 / variance, named)


def log_effects(log_steps: Callable[[Floats], Floats], middle: Floats, reach: Floats, upper: Floats) -> Floats:
    """[runs, n] by how much the logarithms of steps change for each unit of n variables.

    The mean over what a variable may be: an exchange that is hidden at the middle may show at an end. log_steps: takes
    [K, n] variables, gives [runs, K] logarithms. middle, reach: [n] of the variables, and how far to either side.
    upper: [n] the largest values.
    """
    above = np.minimum(middle + np.diag(reach), upper)
    below = middle - np.diag(reach)
    values = log_steps(np.vstack([above, below]))
    change = values[:, : middle.size] - values[:, middle.size :]
    return np.asarray(change / (np.diag(above) - np.diag(below)))
