"""Measures experts that move between ranks, for `benchmarks/balance.py rebalance`: bits, faults, and evenness."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from runtime.moe.rebalance_cases import Case
from schedc_runtime.migration.candidates import MoveTerms, choose_places
from schedc_runtime.migration.forecast import forecast
from schedc_runtime.moe.placement import ExpertPlaces
from schedc_runtime.testing import pool

EXPERTS, RANKS, PER_NODE, STEPS, KEPT = 256, 32, 8, 200, 32
CALM = {"0.2, 0.02": (0.2, 0.02), "0.4, 0.05": (0.4, 0.05), "0.6, 0.05": (0.6, 0.05)}
"""Exponent of Zipf's law, and drift of its logits in each step."""
EVERY = (0, 50, 10)


def rebalance(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of moves on four real processes, and of choices for drawn loads."""
    nodes = "  topology nodes 2 x 2\n  overlap auto\n  alltoall {}\n"
    runs = [Case("1f1b", {"P": 1, "M": 2}, nodes.format(way)) for way in ("flat", "hierarchical", "allgather")]
    runs += [Case("zbh1", {"P": 2, "M": 4}, nodes.format("hierarchical").replace("2 x 2", "1 x 2"))]
    answers = pool(4).run("runtime.moe.rebalance_cases:processes", cases=runs, timeout=500)
    wrong = [sum(bool(each[0]) or not each[2] for each in everyone) for everyone in zip(*answers, strict=True)]
    faults = pool(4).run("runtime.moe.rebalance_cases:faults", run=runs[0], timeout=500)
    torn = [
        len({str(each[3]) for each in everyone}) > 1 or not all("planted" in each[2] for each in everyone)
        for everyone in zip(*faults, strict=True)
    ]
    return {
        "cases": len(runs) + len(torn),
        "failed": sum(map(bool, wrong)) + sum(torn),
        "bytes": [sum(each[3] for each in everyone) for everyone in zip(*answers, strict=True)],
        "max over mean": {name: evenness(*skew, options.seed) for name, skew in CALM.items()},
    }


def evenness(power: float, drift: float, seed: int) -> dict[str, float]:
    """Mean over steps of the fullest rank's rows over the mean, by steps between choices; 0: experts stay.

    ms: of a choice, the median. moved: experts of a choice every tenth step, the mean.
    """
    means: dict[str, float] = {}
    for every in EVERY:
        random, places = np.random.default_rng(seed), ExpertPlaces.home(EXPERTS)
        logits = random.permutation(-power * np.log(np.arange(1, EXPERTS + 1)))
        full, loads, took, moved = [], [], [], []
        terms = MoveTerms(RANKS, PER_NODE, 0.001, 0.009, max(1, every), 0.01)
        for step in range(STEPS):
            logits = logits + drift * random.normal(size=EXPERTS)
            share = np.exp(logits) / np.exp(logits).sum()
            loads.append(random.multinomial(64 * 4096 * 8, share))
            full.append(float(loads[-1][list(places.order)].reshape(RANKS, -1).sum(1).max() / loads[-1].sum() * RANKS))
            if every and (step + 1) % every == 0:
                before = time.process_time_ns()
                choice = choose_places(forecast(np.array(loads[-KEPT:])).share, places, terms)
                took.append((time.process_time_ns() - before) / 1e6)
                places = choice.places
                moved.append(choice.moved)
        means[f"every {every}" if every else "never"] = round(statistics.mean(full), 3)
    return {**means, "ms": round(statistics.median(took), 1), "moved": round(statistics.mean(moved), 1)}
