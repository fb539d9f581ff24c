"""Checks a fit on rows that it has not seen: cross validation, models left out, and the choice among measured plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from schedc.ir.arrays import Floats, Int64
from schedc.planner.fit.estimate import Estimate, Estimator
from schedc.planner.fit.left_out import FACTOR, LeftOutModel, factor_of
from schedc.planner.fit.rows import MeasuredRow
from schedc.planner.price.intervals import REACH
from schedc.planner.times.problem import TrainingRun

FOLDS, REPEATS = 5, 3

_TOP = 5
_LEAST_CHOICE = 4
"""Measured plans of one model and batch that make a choice."""


@dataclass(frozen=True)
class ModelLeftOut:
    """Errors on the rows of a model whose rows the fit has not seen.

    held: [rows] 1 where the measured step is in its interval, by the factor of the other models. widths: [rows] how far
    the upper ends of the intervals are above the predictions, less one.
    """

    rows: int
    mape_pct: float
    bias_pct: float
    held: tuple[float, ...]
    widths: tuple[float, ...]
    regret_pct: float | None
    """Step of the best of the five plans with the least prediction, over the least measured; None without a choice."""
    spearman: float | None = None
    """Rank correlation of predicted and measured steps among the plans of a choice, the mean; None without a choice."""


@dataclass(frozen=True)
class Validation:
    """Errors on rows that a fit has not seen.

    cv_mape_pct: mean error on rows left out in folds. models: errors by model left out; empty for rows of one model.
    factor: how many times the rows' own spread intervals need (`factor_of`).
    """

    cv_mape_pct: float
    models: dict[str, ModelLeftOut]
    factor: float = FACTOR

    @property
    def held_pct(self) -> float:
        """Share of the rows of models left out that are in their intervals."""
        return 100.0 * _mean(value for model in self.models.values() for value in model.held)

    @property
    def width_pct(self) -> float:
        """How far the upper ends of these intervals are above the predictions, in the mean."""
        return 100.0 * _mean(value for model in self.models.values() for value in model.widths)


def errors(estimator: Estimator, position: Floats) -> Floats:
    """[rows] predicted over measured, less one."""
    return np.asarray(estimator.predict(position) / estimator.step_s - 1.0)


def validate(estimator: Estimator, rows: Sequence[MeasuredRow], whole: Estimate) -> Validation:
    """Fits again without each fold, and without each model. Folds are drawn with fixed seeds."""
    every = np.arange(len(rows))
    unseen = []
    for seed in range(REPEATS):
        fold = np.random.default_rng(seed).permutation(every.size) % min(FOLDS, every.size)
        for number in range(min(FOLDS, every.size)):
            part = estimator.estimate(every[fold != number], whole.position)
            unseen.append(errors(estimator, part.position)[fold == number])
    folds = np.abs(np.concatenate(unseen))
    models = models_left_out(estimator, rows, whole)
    return Validation(100.0 * float(folds.mean()), errors_by_model(estimator, rows, models), factor_of(models))


def models_left_out(estimator: Estimator, rows: Sequence[MeasuredRow], whole: Estimate) -> list[LeftOutModel]:
    """Each model beside what the rows of the others predict; nothing for rows of one model."""
    names = np.array([row.run.model.name for row in rows])
    models = []
    for name in dict.fromkeys(names.tolist()):
        own = np.flatnonzero(names == name)
        if own.size < names.size:
            part = estimator.estimate(np.flatnonzero(names != name), whole.position)
            models.append(LeftOutModel.of(estimator, name, own, part))
    return models


def errors_by_model(
    estimator: Estimator, rows: Sequence[MeasuredRow], models: Sequence[LeftOutModel]
) -> dict[str, ModelLeftOut]:
    """The errors of each model. Its intervals are by the factor of the others."""
    names = np.array([row.run.model.name for row in rows])
    return {
        model.name: _left_out(
            estimator, rows, np.flatnonzero(names == model.name), model, factor_of([*models[:at], *models[at + 1 :]])
        )
        for at, model in enumerate(models)
    }


def _left_out(
    estimator: Estimator, rows: Sequence[MeasuredRow], own: Int64, model: LeftOutModel, factor: float
) -> ModelLeftOut:
    ratios = model.ratios
    predicted = estimator.predict(model.part.position)
    regrets, correlations = [], []
    for choice in choices(rows, own).values():
        best = min(rows[row].step_s for row in choice)
        chosen = sorted(choice, key=lambda row: predicted[row])[:_TOP]
        regrets.append(min(rows[row].step_s for row in chosen) / best - 1.0)
        correlations.append(spearman(predicted[choice], np.array([rows[row].step_s for row in choice])))
    regret = 100.0 * max(regrets) if regrets else None
    mape, bias = 100.0 * float(np.abs(ratios).mean()), 100.0 * float(ratios.mean())
    rank = float(np.mean(correlations)) if correlations else None
    widths = np.expm1(REACH * model.deviation(factor))
    return ModelLeftOut(own.size, mape, bias, tuple(model.held(factor)), tuple(widths), regret, rank)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values] or [0.0]))


def spearman(predicted: Floats, measured: Floats) -> float:
    """The rank correlation of two columns of [n] values; equal ones share their mean rank. 0 where all are equal."""
    ranks = [
        (values[:, None] > values).sum(axis=1) + 0.5 * (values[:, None] == values).sum(axis=1)
        for values in (predicted, measured)
    ]
    a, b = (rank - rank.mean() for rank in ranks)
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else 0.0


def choices(rows: Sequence[MeasuredRow], own: Int64) -> dict[tuple[object, ...], list[int]]:
    """Rows that do the same step in other ways: of one model, batch, devices and precision. own: [n] their numbers."""
    groups: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for row in own.tolist():
        run: TrainingRun = rows[row].run
        groups[run.model, run.problem.sequences, run.axes.devices, run.problem.precision, run.cluster.name].append(row)
    return {key: choice for key, choice in groups.items() if len(choice) >= _LEAST_CHOICE}
