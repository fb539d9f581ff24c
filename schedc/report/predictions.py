"""Reports predictions beside measured rows, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from schedc.planner.fit.fitted import Fit
from schedc.planner.fit.predict import ErrorSummary, PredictedRow, by_schedule
from schedc.planner.fit.rows import MeasuredRows


def to_json(rows: Sequence[PredictedRow], measured: MeasuredRows, fit: Fit | None) -> dict[str, Any]:
    """What `schedc plan predict --json` prints. fit: None for constants at their priors."""
    memory = ErrorSummary.of(row.memory_error for row in rows)
    time = ErrorSummary.of(row.time_error for row in rows)
    return {
        "fit": None if fit is None else {"name": fit.name, "rows": fit.rows, "cv_mape_pct": fit.cv_mape_pct},
        "forced": bool(fit and fit.unseen),
        "unseen": list(fit.unseen) if fit else [],
        "interval_pct": None if fit is None or not fit.interval_pct else fit.interval_pct,
        "time": None if time is None else asdict(time),
        "memory": None if memory is None else asdict(memory),
        "by_schedule": {name: asdict(summary) for name, summary in by_schedule(rows).items()},
        "left_out": [{"line": line, "row": name, "reason": why} for line, name, why in measured.left_out],
        "rows": [_row(row) for row in rows],
    }


def _row(row: PredictedRow) -> dict[str, Any]:
    facts: dict[str, Any] = {"row": row.row.name, "line": row.row.line, "schedule": row.row.called}
    facts |= {"measured_s": row.row.step_s, "step_s": row.step_s, "error_pct": 100.0 * row.time_error}
    if row.memory_bytes is not None and row.memory_error is not None:
        facts |= {"measured_bytes": row.row.peak_bytes, "memory_bytes": row.memory_bytes}
        facts |= {"memory_error_pct": 100.0 * row.memory_error}
    return facts


def to_text(facts: dict[str, Any]) -> str:
    """What `schedc plan predict` prints."""
    lines = []
    for row in facts["rows"]:
        line = f"{row['row']:<24} {row['measured_s']:10.4g} s  {row['step_s']:10.4g} s {row['error_pct']:+6.1f} %"
        if "memory_bytes" in row:
            measured, predicted = row["measured_bytes"] / 2**30, row["memory_bytes"] / 2**30
            line += f"  {measured:8.2f} GiB {predicted:8.2f} GiB {row['memory_error_pct']:+6.1f} %"
        lines.append(line)
    lines.append("")
    for name, summary in {"time": facts["time"], "memory": facts["memory"], **facts["by_schedule"]}.items():
        if summary is not None:
            errors = f"{summary['mape_pct']:.2f} % mean error, {summary['bias_pct']:+.2f} % bias"
            lines.append(f"{name:<18} {summary['rows']:5} rows: {errors}, {summary['worst_pct']:.1f} % at most")
    for row in facts["left_out"]:
        lines.append(f"left out: line {row['line']}, {row['row']}: {row['reason']}")
    if facts["fit"] is None:
        lines.append("no fit: constants are at their priors")
    else:
        lines.append(f"fit {facts['fit']['name']} of {facts['fit']['rows']} rows")
    if facts["interval_pct"]:
        lines.append(f"four of five unseen rows are within {facts['interval_pct']:.1f} %")
    if facts["forced"]:
        lines.append(f"the fit has no row of {', '.join(facts['unseen'])} (--force-fit)")
    return "\n".join(lines)
