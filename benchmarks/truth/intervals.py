"""The word `intervals`: 90 % intervals of steps whose model was left out, over all published rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from published.refit import HELD_OUT, ONLY

from schedc.planner.fit.estimate import Estimator
from schedc.planner.fit.rows import MeasuredRows, load_rows
from schedc.planner.fit.validate import errors_by_model, models_left_out
from schedc.planner.times.table import RunTable
from truth.cases import Options, Verdict

PUBLISHED = Path(__file__).parents[1] / "published"

LEAST_PCT, MOST_PCT, LEAST_OF_FILE_PCT = 85.0, 95.0, 80.0


def intervals(options: Options) -> Verdict:
    """Each model of each file beside the fit of the file's other models. A case is a file, or all rows together.

    options: cases, where above 0, takes only so many files, those with the fewest rows.
    """
    files = {path.stem: _rows(path) for path in sorted(PUBLISHED.glob("*.csv")) if path.stem not in HELD_OUT}
    names = sorted(files, key=lambda name: len(files[name].rows))[: options.cases or None]
    held: dict[str, list[float]] = {}
    widths: dict[str, list[float]] = {}
    for name in names:
        held[name], widths[name] = _of_file(files[name])
    figures: dict[str, Any] = {name: _figures(held[name], widths[name]) for name in names if held[name]}
    every = [[value for name in names for value in of[name]] for of in (held, widths)]
    figures["all rows"] = _figures(*every)
    failed = [name for name, each in figures.items() if each["held_pct"] < LEAST_OF_FILE_PCT]
    if not LEAST_PCT <= figures["all rows"]["held_pct"] <= MOST_PCT and "all rows" not in failed:
        failed.append("all rows")
    return Verdict(len(figures), tuple(failed), figures)


def _rows(path: Path) -> MeasuredRows:
    measured = load_rows(path)
    return measured.only(ONLY[path.stem]) if path.stem in ONLY else measured


def _of_file(measured: MeasuredRows) -> tuple[list[float], list[float]]:
    """Whether each row is in its interval, and the width of the interval, of all models left out."""
    rows = measured.rows
    estimator = Estimator(RunTable([row.run for row in rows]), np.array([row.step_s for row in rows]))
    models = models_left_out(estimator, rows, estimator.estimate(np.arange(len(rows))))
    errors = errors_by_model(estimator, rows, models).values()
    return [each for model in errors for each in model.held], [each for model in errors for each in model.widths]


def _figures(held: list[float], widths: list[float]) -> dict[str, Any]:
    """mean_width_pct: how far the upper ends of the intervals are above the predictions."""
    return {
        "rows": len(held),
        "held_pct": 100.0 * float(np.mean(held)),
        "mean_width_pct": 100.0 * float(np.mean(widths)),
    }
