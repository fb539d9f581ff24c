"""Measures what recording the routing costs a step, for `benchmarks/balance.py record`."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from runtime.moe.hot_cases import pipeline, skewed, step
from schedc_runtime import Pipeline

WAYS = {
    "exact": "",
    "bounded": "  sizes bounded 4\n",
    "hot by microbatch": "  hot 1 by microbatch\n",
    "balance by step": "  balance by step\n",
}
"""Lines of a plan by name: what ranks gather, and where rows are counted, differs by these."""
MOST = 1.01
"""The largest part of a step without recording that a step with it may take."""
WARM_UP = 6
"""Steps of both kinds before the first that counts; copies by step exist from the second on."""


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of steps with and without recording, by plan."""
    random.seed(options.seed)
    figures = {name: _compared(lines, options.pairs) for name, lines in WAYS.items()}
    return {
        "cases": len(figures),
        "failed": sum(each["ratio"] > MOST for each in figures.values()),
        "recorded over not": figures,
    }


def _compared(lines: str, pairs: int) -> dict[str, float]:
    """Ratio of processor times of two steps side by side, its standard error, and milliseconds without recording."""
    model = skewed(1.0, moe_blocks=4)
    plan = f"  experts 8 top 2\n  topology nodes 1 x 2\n  overlap off\n{lines}"
    pipe = pipeline("1f1b", {"P": 1, "M": 4}, plan, model)
    kinds: dict[bool, Callable[[Pipeline], None]] = {False: _step, True: _recorded}
    for _ in range(WARM_UP):
        _timed(_step, pipe)
        _timed(_recorded, pipe)
    ratios, without = [], []
    for _ in range(pairs):
        order = random.sample([False, True], 2)
        took = {recording: _timed(kinds[recording], pipe) for recording in order}
        ratios.append(took[True] / took[False])
        without.append(took[False])
    pipe.close()
    kept = sorted(ratios)[pairs // 10 : pairs - pairs // 10]  # what else ran on the machine is in the tails
    return {
        "ratio": statistics.mean(kept),
        "error": statistics.stdev(kept) / math.sqrt(len(kept)),
        "step_ms": statistics.median(without),
    }


def _timed(run: Callable[[Pipeline], None], pipe: Pipeline) -> float:
    """Milliseconds of this process's processor time. Gradients are cleared before."""
    pipe.zero_grad()
    before = time.process_time_ns()
    run(pipe)
    return (time.process_time_ns() - before) / 1e6


def _step(pipe: Pipeline) -> None:
    step(pipe)


def _recorded(pipe: Pipeline) -> None:
    """A step of a record of its own, opened and closed as well."""
    with pipe.record_routing():
        step(pipe)
