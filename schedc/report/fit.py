"""Reports fits of constants, and predictions with them beside measured steps, as text and as JSON."""

from __future__ import annotations

from typing import Any

from schedc.planner.fit.fitting import FitResult
from schedc.planner.fit.validate import ModelLeftOut
from schedc.planner.times.constants import described

_WORST = 8
"""Rows that the text shows; JSON has all."""


def fit_to_json(result: FitResult) -> dict[str, Any]:
    """What `schedc fit --json` prints."""
    fit, check = result.fit, result.validation
    constants = {
        name: {"value": value, "prior": described(name).median, "unit": described(name).unit}
        for name, value in fit.constants.items()
    }
    facts: dict[str, Any] = {"schema": "schedc.fit", "version": 1} | {
        "fit": fit.name,
        "rows": fit.rows,
        "times": fit.calibrated,
        "devices": list(fit.devices),
        "precisions": list(fit.precisions),
        "fit_mape_pct": result.mape_pct,
        "bias_pct": result.bias_pct,
        "within_10_pct": result.within_10_pct,
        "constants": constants,
        "at_bound": list(fit.at_bound),
        "at_prior": list(fit.at_prior),
        "times_mape_pct": result.times_mape_pct,
        "fewer_rows_than_constants": fit.rows + fit.calibrated < len(constants),
        "left_out": [{"line": line, "row": name, "reason": why} for line, name, why in result.measured.left_out],
        "residuals": [
            {"row": row.name, "line": row.line, "measured_s": row.step_s, "error_pct": 100.0 * ratio}
            for row, ratio in zip(result.measured.rows, result.ratios, strict=True)
        ],
    }
    names = [(row, time) for row in result.measured.calibrated for time in row.times]
    facts["calibrated"] = [
        {
            "row": row.name,
            "line": row.line,
            "time": time.name,
            "measured_s": time.seconds,
            "spread_pct": 100.0 * time.spread,
        }
        | {"error_pct": 100.0 * ratio}
        for (row, time), ratio in zip(names, result.times, strict=True)
    ]
    if check is not None:
        facts |= {
            "cv_mape_pct": check.cv_mape_pct,
            "factor": check.factor,
            "held_pct": check.held_pct if check.models else None,
            "mean_width_pct": check.width_pct if check.models else None,
            "leave_model_out": {name: _model(model) for name, model in check.models.items()},
            "regret_top5_pct": {name: m.regret_pct for name, m in check.models.items() if m.regret_pct is not None},
            "spearman": {name: m.spearman for name, m in check.models.items() if m.spearman is not None},
        }
    return facts


def _model(model: ModelLeftOut) -> dict[str, Any]:
    facts = {"rows": model.rows, "mape_pct": model.mape_pct, "bias_pct": model.bias_pct, "held": sum(model.held)}
    return facts | {"regret_top5_pct": model.regret_pct, "spearman": model.spearman}


def fit_to_text(result: FitResult) -> str:
    """What `schedc fit` prints."""
    fit, facts = result.fit, fit_to_json(result)
    lines = [
        f"{fit.name}: {fit.rows} rows of {', '.join(fit.devices)}; {', '.join(fit.precisions)}",
    ]
    if fit.rows:
        lines.append(
            f"fitted     {result.mape_pct:5.2f} % mean error, {result.bias_pct:+.2f} % bias,"
            f" {result.within_10_pct:.0f} % of rows within 10 %"
        )
    if fit.calibrated:
        lines.append(f"calibrated {result.times_mape_pct:5.2f} % mean error of {fit.calibrated} times of parts")
    if result.validation is not None:
        lines += _validation_lines(result)
    lines.append("")
    width = max(map(len, fit.constants))
    for name, value in fit.constants.items():
        mark = "at its bound" if name in fit.at_bound else "stays at its prior" if name in fit.at_prior else ""
        constant = described(name)
        line = f"  {name:<{width}} {value:10.4g}  {constant.unit:<10} prior {constant.median:<8.4g} {mark}"
        lines.append(line.rstrip())
    if facts["fewer_rows_than_constants"]:
        count = fit.rows + fit.calibrated
        what = "measurement" if count == 1 else "measurements"
        lines.append(f"{count} {what} for {len(fit.constants)} constants: the priors decide much of this fit")
    order = sorted(facts["residuals"], key=lambda row: -abs(row["error_pct"]))[:_WORST]
    lines += ["", "largest errors:"]
    lines += [f"  {row['row']:<24} {row['measured_s']:10.4g} s  {row['error_pct']:+6.1f} %" for row in order]
    if facts["left_out"]:
        lines += ["", f"{len(facts['left_out'])} rows left out:"]
        lines += [f"  line {row['line']:<5} {row['row']:<24} {row['reason']}" for row in facts["left_out"]]
    return "\n".join(lines)


def _validation_lines(result: FitResult) -> list[str]:
    check = result.validation
    assert check is not None
    lines = [f"left out   {check.cv_mape_pct:5.2f} % mean error in 5 folds, three times"]
    for name, model in check.models.items():
        regret = "" if model.regret_pct is None else f"; best of 5 chosen: {model.regret_pct:.2f} % above the best"
        if model.spearman is not None:
            regret += f", rank correlation {model.spearman:.2f}"
        errors = f"{model.mape_pct:5.2f} % mean error, {model.bias_pct:+.2f} % bias"
        lines.append(f"  without {name:<24} {model.rows:4} rows: {errors}{regret}")
    if not check.models:
        lines.append("  all rows are of one model: no model can be left out")
    else:
        held = f"{check.held_pct:.0f} % of these rows, {check.width_pct:.1f} % wide to one side in the mean"
        lines.append(f"intervals  hold {held}; 90 % is the aim (spread of rows times {check.factor:.2f})")
    return lines
