"""Checks steps of every kind that a graph can hold, and replays them. `device.py capture` prints the figures.

Each kind of step is checked under four schedules. Then V, looped and bidirectional programs train with steps as graphs
(on a CPU: tapes), and must have the bits of the same training without graphs. Exact routes must be refused.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from support.capture_cases import KINDS, SMALL, judged, pipeline
from support.graph_cases import differing, trained, with_graphs, zeroed_or_dropped

SCHEDULES = ("1f1b", "zbh1", "zbv", "dualpipev")
REPLAYED = (
    ("dense", "zbv", None),
    ("dense", "interleaved_1f1b", None),
    ("dense", "dualpipe", None),
    ("chunked", "dualpipev", None),
    ("padded", "dualpipev", SMALL),
    ("tight", "zbv", SMALL),
)
"""Routes, schedule and sizes of trainings whose steps are graphs."""
STEPS = 8


def capture() -> tuple[int, list[str], list[dict[str, Any]]]:
    """The number of cases, what is wrong with them, and a row of figures for each."""
    failed, rows = [], []
    for kind, schedule in product(KINDS, SCHEDULES):
        report = judged(pipeline(kind, schedule))
        failed += [f"{schedule}, {kind}: {finding}" for finding in report.findings]
        rows.append({"routes": kind, "schedule": schedule, "launches": report.launches, "replayed": 0})
    exact = judged(pipeline("exact", "1f1b"))
    if not any(each.kind == "host read" and each.where.startswith("moe/sizes.py:") for each in exact.findings):
        failed.append(f"exact routes: no host read in moe/sizes.py, but: {exact}")
    for kind, schedule, sizes in REPLAYED:
        plain, pipe = (
            trained(pipeline(kind, schedule, sizes), STEPS, zeroed_or_dropped),
            with_graphs(kind, schedule, sizes),
        )
        names = differing(plain, trained(pipe, STEPS, zeroed_or_dropped))
        failed += [f"{schedule}, {kind}: other bits of {', '.join(names[:3])}"] if names else []
        graphs = pipe._runner.graphs
        rows.append({"routes": kind, "schedule": schedule, "launches": 0, "replayed": graphs.replays if graphs else 0})
        if not rows[-1]["replayed"]:
            failed.append(f"{schedule}, {kind}: no step was replayed")
    return len(rows) + 1, failed, rows
