"""Measures what recording the routing costs a step, for `benchmarks/balance.py record`."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from runtime.moe.hot_cases import pipeline, skewed, step
from schedc_runtime import Pipeline
from schedc_runtime.pipeline.step import routing_record
from schedc_runtime.pipeline.step.routing_record import RoutingRecord

WAYS = {
    "exact": "",
    "bounded": "  sizes bounded 4\n",
    "hot by microbatch": "  hot 1 by microbatch\n",
    "balance by step": "  balance by step\n",
}
"""Lines of a plan by name: what ranks gather, and where rows are counted, differs by these."""
MOST = 1.01
"""The largest part of a step without recording that a step with it may take."""
MEDIAN = 1.2533
"""Standard error of a median over that of a mean, of normal numbers: the root of pi / 2."""
WARM_UP = 2
"""Steps of both kinds before the first that counts; copies by step exist from the second on."""


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of steps with and without recording, by plan."""
    random.seed(options.seed)
    figures = {name: _compared(lines, options.pairs) for name, lines in WAYS.items()}
    return {
        "cases": len(figures),
        "failed": sum(_costs_more(each) for each in figures.values()),
        "recorded over not": figures,
    }


def _costs_more(figures: dict[str, float]) -> bool:
    """Whether the work of a record is too much, or whole steps are too long by more than their noise."""
    return figures["own"] > MOST or figures["ratio"] - 3 * figures["error"] > MOST


class Own:
    """Processor time of the record itself: while it is opened and closed, and in the hooks of layers."""

    def __init__(self) -> None:
        self.ns = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts."""

        def call(*arguments: Any) -> Any:
            before = time.thread_time_ns()
            try:
                return function(*arguments)
            finally:
                self.ns += time.thread_time_ns() - before

        return call

    def patches(self) -> ExitStack:
        """Lets the time of every record count until the stack is closed."""
        stack, hook = ExitStack(), routing_record._hook
        stack.enter_context(patch.object(routing_record, "_hook", lambda *given: self.timed(hook(*given))))
        for name in ("__enter__", "__exit__"):
            timed = self.timed(getattr(RoutingRecord, name))
            stack.enter_context(patch.object(RoutingRecord, name, timed))
        return stack


def _compared(lines: str, pairs: int) -> dict[str, float]:
    """Processor times of two steps side by side: their ratio, its standard error, and the part of the record itself."""
    model = skewed(1.0, moe_blocks=4)
    plan = f"  experts 8 top 2\n  topology nodes 1 x 2\n  overlap off\n{lines}"
    pipe = pipeline("1f1b", {"P": 1, "M": 4}, plan, model)
    kinds: dict[bool, Callable[[Pipeline], None]] = {False: _step, True: _recorded}
    own = Own()
    ratios, without, parts = list[float](), list[float](), list[float]()
    with own.patches():
        for pair in range(WARM_UP + pairs):
            before, took = own.ns, {}
            for recording in random.sample([False, True], 2):
                took[recording] = _timed(kinds[recording], pipe)
            if pair >= WARM_UP:
                ratios.append(took[True] / took[False])
                without.append(took[False])
                parts.append((own.ns - before) / 1e6)
    pipe.close()
    step_ms = statistics.median(without)
    return {
        "own": 1 + statistics.median(parts) / step_ms,
        "ratio": statistics.median(ratios),  # what else ran on the machine is in the tails
        "error": MEDIAN * statistics.stdev(ratios) / math.sqrt(pairs),
        "step_ms": step_ms,
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
