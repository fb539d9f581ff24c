"""How much farther steps of a model are from predictions by rows of other models than the rows' own spread says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.planner.fit.estimate import Estimate, Estimator
from schedc.planner.price.intervals import REACH, SHARE, log_effects

FACTOR = 1.8
"""The factor of a fit without models that were left out: that of shipped rows, about."""

MOST_FACTOR = 5.0
"""A larger factor would say of every plan how far off one odd model was."""

_FACTORS = np.geomspace(0.5, 10.0, 120)


@dataclass(frozen=True, eq=False)
class LeftOutModel:
    """The rows of a model beside what rows of the others predict.

    ratios: [rows] predicted over measured, less one. effects: [rows, constants] what the logarithm of a step changes by
    for a width of a constant's prior. part: the estimate from the rows of the others.
    """

    name: str
    ratios: Floats
    effects: Floats
    part: Estimate

    @classmethod
    def of(cls, estimator: Estimator, name: str, own: Int64, part: Estimate) -> LeftOutModel:
        """own: [n] numbers of the model's rows."""
        predicted = estimator.predict(part.position)[own]
        effects = log_effects(
            lambda positions: np.log(estimator.steps(positions)[own]),
            part.position,
            np.sqrt(np.diag(part.covariance(FACTOR))),
            np.maximum(estimator.upper, part.position),
        )
        return cls(name, predicted / estimator.step_s[own] - 1.0, effects, part)

    def deviation(self, factor: float) -> Floats:
        """[rows] standard deviation of the logarithm of a step, if rows differ by ``factor`` times their spread."""
        of_constants = np.einsum("ri,ij,rj->r", self.effects, self.part.covariance(factor), self.effects)
        return np.asarray(np.sqrt((factor * self.part.row_spread) ** 2 + of_constants))

    def held(self, factor: float) -> Floats:
        """[rows] 1 where a step is within its interval."""
        return np.asarray(np.abs(np.log1p(self.ratios)) <= REACH * self.deviation(factor), np.float64)


def factor_of(models: Sequence[LeftOutModel]) -> float:
    """How many times their own spread rows of another model are off, for intervals that hold their share.

    It holds this share of the rows of the models left out. What a few models say is uncertain: Student's distribution
    with a degree of freedom for each model replaces the normal one.
    """
    from scipy.special import stdtrit

    if not models:
        return FACTOR
    enough = (each for each in _FACTORS if np.concatenate([model.held(each) for model in models]).mean() >= SHARE)
    own = float(next(enough, _FACTORS[-1]))
    return min(MOST_FACTOR, own * float(stdtrit(len(models), 0.5 + 0.5 * SHARE)) / REACH)
