"""Measures what `schedc tune` gains, and how often 1F1B already is the best order within its memory.

    python benchmarks/tune.py [--json] [--random 300]

Every search is within the memory that the schedule has without it, and within a time limit (docs/guide/tuning.md).

Instrument: the makespan by our own timeline, in time units of the costs; wall clock beside it.

Printed for each case: the makespan before and after, the proven lower bound, the origin of the best order, and seconds.
Printed for 1F1B under random uneven costs: how often it is proven best, how often no proof is found, and the largest
gain.
"""

from __future__ import annotations

import argparse
import json
import random
from time import perf_counter
from typing import Any

from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.search.problem import Freedom
from schedc.search.solver import Effort
from schedc.search.tune import TuningResult, tune
from schedc.step.costs.costs import Costs
from schedc.step.memory import measure_memory

UNEVEN = Costs(F=(1.3, *[1.0] * 14, 1.8), p2p=0.05)
CASES: tuple[tuple[str, dict[str, int], Costs, Freedom, float], ...] = (
    ("1f1b", {"P": 4, "M": 8}, Costs(), Freedom(split=True), 30),
    ("1f1b", {"P": 8, "M": 24}, Costs(F=(1, 1, 1.6, 1, 1, 1.2, 1, 1), p2p=0.1), Freedom(split=True), 30),
    ("dualpipev", {"P": 4, "M": 10}, Costs(), Freedom(keep_pairs=False), 30),
    ("interleaved_1f1b", {"P": 8, "M": 16}, UNEVEN, Freedom(), 30),
    ("interleaved_1f1b", {"P": 8, "M": 16}, UNEVEN, Freedom(split=True), 60),
    ("zbv", {"P": 8, "M": 16}, UNEVEN, Freedom(), 30),
)


def tuned(name: str, sizes: dict[str, int], costs: Costs, freedom: Freedom, seconds: float) -> TuningResult:
    """The search within the memory that each rank of the schedule has without it."""
    seed = legal_schedule(open_input(name), sizes)
    caps = measure_memory(seed, costs).peak_memory
    return tune(seed, costs, caps=caps, freedom=freedom, effort=Effort(seconds))


def case(name: str, sizes: dict[str, int], costs: Costs, freedom: Freedom, seconds: float) -> dict[str, Any]:
    began = perf_counter()
    result = tuned(name, sizes, costs, freedom, seconds)
    return {
        "schedule": name,
        **sizes,
        "split": freedom.split,
        "seed": result.seed.value,
        "found": result.best.value,
        "bound": result.bound,
        "origin": result.origin,
        "seconds": perf_counter() - began,
    }


def random_1f1b(count: int) -> dict[str, Any]:
    """1F1B under random uneven costs, within its memory: how often it is best already, and the largest gain."""
    draw, best, gain, unproven = random.Random(1), 0, 0.0, 0
    for _ in range(count):
        ranks = draw.randint(2, 6)
        sizes = {"P": ranks, "M": draw.randint(ranks, 3 * ranks)}
        lanes = [tuple(round(draw.uniform(0.5, 2), 2) for _ in range(ranks)) for _ in range(3)]
        costs = Costs(F=lanes[0], I=lanes[1], W=lanes[2], p2p=draw.choice([0, 0.1, 0.5]))
        result = tuned("1f1b", sizes, costs, Freedom(), 3)
        unproven += not result.proven
        best += result.origin == "seed" and result.proven
        gain = max(gain, 1 - result.best.value / result.seed.value)
    return {"tried": count, "best_already": best, "unproven": unproven, "largest_gain": gain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--random", type=int, default=300, metavar="N", help="random cost vectors for 1F1B")
    options = parser.parse_args()
    cases = [case(*arguments) for arguments in CASES]
    study = random_1f1b(options.random)
    if options.json:
        print(json.dumps({"cases": cases, "random_1f1b": study}))
        return
    for row in cases:
        name = f"{row['schedule']} P={row['P']} M={row['M']}{' --split' if row['split'] else ''}"
        print(f"{name:<36} {row['seed']:>8g} -> {row['found']:<8g} bound {row['bound']:<8g} {row['origin']:<7} "
              f"{row['seconds']:.1f} s")  # fmt: skip
    print(f"1F1B under {study['tried']} random uneven costs: {study['best_already']} times best already, "
          f"{study['unproven']} not proven, largest gain {study['largest_gain']:.2%}")  # fmt: skip


if __name__ == "__main__":
    main()
