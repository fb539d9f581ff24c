"""Checks steps of every kind that a graph can hold. `device.py capture` prints the figures."""

from __future__ import annotations

from itertools import product
from typing import Any

from support.capture_cases import KINDS, judged, pipeline

SCHEDULES = ("1f1b", "zbh1", "zbv", "dualpipev")


def capture() -> tuple[int, list[str], list[dict[str, Any]]]:
    """The number of steps, what is wrong with them, and a row of figures for each."""
    failed, rows = [], []
    for kind, schedule in product(KINDS, SCHEDULES):
        report = judged(pipeline(kind, schedule))
        failed += [f"{schedule}, {kind}: {finding}" for finding in report.findings]
        rows.append({"routes": kind, "schedule": schedule, "launches": report.launches})
    exact = judged(pipeline("exact", "1f1b"))
    if not any(each.kind == "host read" and each.where.startswith("moe/sizes.py:") for each in exact.findings):
        failed.append(f"exact routes: no host read in moe/sizes.py, but: {exact}")
    return len(rows) + 1, failed, rows
