"""Refuses rows whose step is written in another unit than that of the others: milliseconds beside seconds."""

from __future__ import annotations

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.ir.arrays import Floats
from schedc.planner.fit.rows import MeasuredRows, finding_at

_LEAST, _MOST = 300.0, 3000.0
"""Between these factors a step is a thousand times what the other rows say, or a thousandth of it."""
_ENOUGH = 3
"""Rows from which on most of them tell the unit."""


def check_units(measured: MeasuredRows, predicted: Floats) -> None:
    """Raises `DiagnosticError` (S723) for each row whose step is about a thousand times off what most rows say.

    predicted: [rows] seconds per step under any constants. What counts is how far a row is from the median of all rows,
    so that a slow machine is no fault.
    """
    rows = measured.rows
    if len(rows) < _ENOUGH:
        return
    share = np.array([row.step_s for row in rows]) / predicted
    off = share / np.median(share)
    findings = []
    for row, factor in zip(rows, off.tolist(), strict=True):
        size = max(factor, 1.0 / factor)
        if _LEAST <= size <= _MOST:
            sign, unit = ("above", "milliseconds") if factor > 1.0 else ("below", "kiloseconds, or a rate in thousands")
            message = f"a step of {row.step_s:g} s is {size:,.0f} times {sign} what most rows say: it looks like {unit}"
            help = "write seconds per step, or tokens per second and device, in each row"
            findings.append(finding_at(measured.source, row.line, "S723", message, help))
    if findings:
        raise DiagnosticError(findings)
