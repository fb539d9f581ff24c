"""Reports predictions beside measured rows, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from schedc.planner.fit.fitted import Fit
from schedc.planner.fit.predict import ErrorSummary, PredictedRow, RowInterval, by_schedule
from schedc.planner.fit.rows import MeasuredRows
from schedc.report.intervals import interval_facts, whose_text
from schedc.report.problem import fit_facts


def to_json(
    rows: Sequence[PredictedRow], intervals: Sequence[RowInterval], measured: MeasuredRows, fit: Fit | None
) -> dict[str, Any]:
    """What `schedc plan predict --json` prints. fit: None for constants at their priors.

    held_pct: share of the rows in their intervals.
    """
    facts = [_row(*each) for each in zip(rows, intervals, strict=True)]
    held = [row["interval"]["low_s"] <= row["measured_s"] <= row["interval"]["high_s"] for row in facts]
    memory = ErrorSummary.of(row.memory_error for row in rows)
    time = ErrorSummary.of(row.time_error for row in rows)
    return {
        "schema": "schedc.predictions",
        "version": 1,
        "fit": None if fit is None else fit_facts(fit),
        "forced": bool(fit and fit.unseen),
        "unseen": list(fit.unseen) if fit else [],
        "held_pct": 100.0 * sum(held) / len(held) if held else None,
        "time": None if time is None else asdict(time),
        "memory": None if memory is None else asdict(memory),
        "by_schedule": {name: asdict(summary) for name, summary in by_schedule(rows).items()},
        "left_out": [{"line": line, "row": name, "reason": why} for line, name, why in measured.left_out],
        "rows": facts,
    }


def _row(row: PredictedRow, interval: RowInterval) -> dict[str, Any]:
    facts: dict[str, Any] = {"row": row.row.name, "line": row.row.line, "schedule": row.row.called}
    facts |= {"measured_s": row.row.step_s, "step_s": row.step_s, "error_pct": 100.0 * row.time_error}
    facts["interval"] = interval_facts(interval.of_step, row.step_s, interval.known)
    facts["beyond"] = list(interval.beyond)
    if row.memory_bytes is not None and row.memory_error is not None:
        facts |= {"measured_bytes": row.row.peak_bytes, "memory_bytes": row.memory_bytes}
        facts |= {"memory_error_pct": 100.0 * row.memory_error}
    return facts


def _all(lists: Iterable[Sequence[str]]) -> list[str]:
    """Each text of some lists once."""
    return list(dict.fromkeys(text for each in lists for text in each))


def to_text(facts: dict[str, Any]) -> str:
    """What `schedc plan predict` prints."""
    lines = []
    for row in facts["rows"]:
        line = f"{row['row']:<24} {row['measured_s']:10.4g} s  {row['step_s']:10.4g} s {row['error_pct']:+6.1f} %"
        line += f"  {row['interval']['low_s']:.4g}-{row['interval']['high_s']:.4g} s"
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
    lines.append(whose_text(facts["fit"]))
    if facts["held_pct"] is not None:
        lines.append(f"{facts['held_pct']:.0f} % of these rows are in their intervals")
    lines += [f"beyond what the fit has seen: {size}" for size in _all(row["beyond"] for row in facts["rows"])]
    undecided = _all(row["interval"]["undecided"] for row in facts["rows"])
    if facts["fit"] is not None and undecided:
        lines.append(f"wide, because no row of the fit decides {', '.join(undecided)}")
    if facts["forced"]:
        lines.append(f"the fit has no row of {', '.join(facts['unseen'])} (--force-fit)")
    return "\n".join(lines)
