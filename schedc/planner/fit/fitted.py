"""A fit: constants, the rows they come from, and how well they predict; written as TOML and read back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.planner.fit.estimate import Estimator
from schedc.planner.fit.rows import MeasuredRows
from schedc.planner.fit.validate import Validation, errors, validate
from schedc.planner.reading.keys import Keys
from schedc.planner.reading.texts import parse_table, read_source
from schedc.planner.times.constants import BY_NAME
from schedc.planner.times.table import RunTable
from schedc.source import NOWHERE

SCHEMA = "schedc.fit/1"


@dataclass(frozen=True)
class Fit:
    """Constants that were fitted to rows.

    devices, precisions: names of those in the rows. rows: how many. hash: of the text they come from. interval_pct: of
    a prediction; 0 where nothing was left out to measure it. at_bound, at_prior: see `Estimate`.
    """

    name: str
    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    rows: int
    hash: str
    constants: dict[str, float]
    interval_pct: float = 0.0
    cv_mape_pct: float = 0.0
    at_bound: tuple[str, ...] = ()
    at_prior: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class FitResult:
    """A fit with its errors.

    ratios: [rows] predicted over measured, less one. validation: None if none was asked for.
    """

    fit: Fit
    measured: MeasuredRows
    ratios: tuple[float, ...]
    validation: Validation | None

    @property
    def mape_pct(self) -> float:
        return 100.0 * float(np.abs(self.ratios).mean())

    @property
    def bias_pct(self) -> float:
        return 100.0 * float(np.mean(self.ratios))

    @property
    def within_10_pct(self) -> float:
        """Share of rows, in percent, whose prediction is within a tenth of the measurement."""
        return 100.0 * float(np.mean(np.abs(self.ratios) <= 0.1))


def fit_rows(measured: MeasuredRows, name: str, cross_validate: bool) -> FitResult:
    """Fits constants to rows. Needs scipy."""
    rows = measured.rows
    estimator = Estimator(RunTable([row.run for row in rows]), np.array([row.step_s for row in rows]))
    whole = estimator.estimate(np.arange(len(rows)))
    validation = validate(estimator, rows, whole) if cross_validate else None
    fit = Fit(
        name,
        tuple(sorted({row.run.cluster.device.name for row in rows})),
        tuple(sorted({row.run.precision for row in rows})),
        len(rows),
        hashlib.sha256(measured.source.text.encode()).hexdigest()[:16],
        whole.constants,
        round(validation.interval_pct, 3) if validation else 0.0,
        round(validation.cv_mape_pct, 3) if validation else 0.0,
        whole.at_bound,
        whole.at_prior,
    )
    return FitResult(fit, measured, tuple(errors(estimator, whole.position).tolist()), validation)


def fit_text(fit: Fit) -> str:
    """The TOML text of a fit."""
    lines = [f"schema = {json.dumps(SCHEMA)}"]
    for key in ("name", "devices", "precisions", "rows", "hash", "interval_pct", "cv_mape_pct", "at_bound", "at_prior"):
        value = getattr(fit, key)
        lines.append(f"{key} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    lines.append("\n[constants]")
    for constant, number in fit.constants.items():
        lines.append(f"{constant} = {number!r}  # {BY_NAME[constant].unit}".rstrip(" #"))
    return "\n".join(lines) + "\n"


def load_fit(path: Path) -> Fit:
    """A fit from its file. Raises `DiagnosticError` (S725) for anything else."""
    source = read_source(path, "S725", "fit")
    keys = Keys(parse_table(source, "S725", SCHEMA), source, "S725")
    name, hash = keys.text("name"), keys.text("hash", default="")
    devices, precisions = _texts(keys, "devices"), _texts(keys, "precisions")
    at_bound, at_prior = _texts(keys, "at_bound"), _texts(keys, "at_prior")
    rows = keys.integer("rows", least=0)
    interval, cv = (keys.number(key, default=0.0, above=-1.0) for key in ("interval_pct", "cv_mape_pct"))
    inner = keys.inner("constants")
    constants = {}
    if inner is None:
        keys.say("constants", "no table `constants`", "write the file with `schedc fit`")
    else:
        constants = {key: inner.number(key, most=BY_NAME[key].most * 1.001) for key in BY_NAME if inner.has(key)}
        inner.refuse_rest()
    keys.refuse_rest()
    keys.stop()
    return Fit(name, devices, precisions, rows, hash, constants, interval, cv, at_bound, at_prior)


def _texts(keys: Keys, key: str) -> tuple[str, ...]:
    keys.taken.add(key)
    value: Any = keys.table.get(key, [])
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(value)
    keys.say(key, f"`{key}` is no list of texts", 'write ["name"]')
    return ()


def check_matches(fit: Fit, measured: MeasuredRows) -> None:
    """Raises `DiagnosticError` (S726) for rows of a device or precision that the fit has not seen."""
    findings = []
    for what, seen, asked in (
        ("device", fit.devices, {row.run.cluster.device.name for row in measured.rows}),
        ("precision", fit.precisions, {row.run.precision for row in measured.rows}),
    ):
        for name in sorted(asked - set(seen)):
            message = f"the fit `{fit.name}` has no row with {what} {name}, only {', '.join(seen)}"
            help = "fit rows of it, or go on with --force-fit"
            findings.append(Diagnostic("S726", message, Label(NOWHERE), help=help))
    if findings:
        raise DiagnosticError(findings)
