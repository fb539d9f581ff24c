"""Measures how fast one schedule is simulated under many costs: a million complete timelines of two schedules.

    python benchmarks/timeline.py [--json] [--simulations 1000000] [--numpy]

Every simulation has cost vectors of its own (F, I, W and p2p drawn at random). It gives the makespan and, for each
rank, the time in which the rank computes and its span. Simulations run in batches of ``--batch`` vectors, and all of
them really run.

Instrument: processor time of the one working thread, which is the time of one free core even under other load; wall
clock beside it. Only drawing the costs is outside the timing. The compiled loop is loaded before; ``--numpy`` measures
without it.

Printed: seconds and simulated ops per second of each schedule.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from figures import give, parser_of

from schedc.elaborate import elaborate
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.step import numba_kernels as compiled
from schedc.step.batch import simulate_batch
from schedc.step.costs.batch import CostBatch
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import simulate

CASES = {
    "1f1b": {"P": 8, "M": 64},
    "interleaved_1f1b": {"P": 16, "v": 2, "M": 128},
}
COLUMNS = ("F", "I", "W", "p2p")


def measure(name: str, sizes: dict[str, int], simulations: int, batch: int) -> dict[str, Any]:
    """Seconds, and ops per second, of a number of simulations."""
    schedule = elaborate(open_schedule(name), sizes)
    rng = np.random.default_rng(1)
    cpu = wall = total = 0.0
    for low in range(0, simulations, batch):
        count = min(batch, simulations - low)
        vectors = {key: rng.uniform(0.5, 2.0, count) for key in COLUMNS}
        costs = CostBatch(**{**vectors, "p2p": vectors["p2p"] / 10})
        start = time.thread_time(), time.perf_counter()
        outcomes = simulate_batch(Dependencies.of(schedule), costs)
        cpu, wall = cpu + time.thread_time() - start[0], wall + time.perf_counter() - start[1]
        total += float(outcomes.makespan.sum())
        check(schedule, costs, outcomes.makespan)
    ops = len(schedule)
    return {
        "schedule": name,
        **sizes,
        "ops": ops,
        "simulations": simulations,
        "cpu_s": cpu,
        "wall_s": wall,
        "ops_per_second": ops * simulations / cpu,
        "mean_makespan": total / simulations,
    }


def check(schedule: Schedule, costs: CostBatch, makespan: Any) -> None:
    """Checks that a cost vector of the batch, simulated alone, has the same makespan. makespan: [batch] time."""
    middle = len(costs) // 2
    alone = Costs(**{key: float(getattr(costs, key)[middle]) for key in COLUMNS})
    if simulate(schedule, alone).makespan != makespan[middle]:
        raise SystemExit("a batched simulation differs from the same one alone")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--simulations", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=50_000, help="cost vectors of one call")
    parser.add_argument("--numpy", action="store_true", help="without the compiled loop")
    arguments = parser.parse_args()
    if arguments.numpy:
        compiled.load = lambda: None  # type: ignore[assignment]
    with_numba = compiled.kernels(float("inf")) is not None
    for name, sizes in CASES.items():  # the first call alone warms up
        measure(name, sizes, 2_000, 2_000)
    rows = [measure(name, sizes, arguments.simulations, arguments.batch) for name, sizes in CASES.items()]
    scale = 1_000_000 / arguments.simulations
    figures = {f"million_{key}_s": row["cpu_s"] * scale for key, row in zip(("1f1b", "interleaved"), rows, strict=True)}
    facts = {
        "instrument": "CPU time of one thread",
        "ops_per_second_per_core": min(row["ops_per_second"] for row in rows),
        **figures,
        "scaled": scale != 1,
        "numba": with_numba,
        "rows": rows,
    }
    give(facts, arguments)


if __name__ == "__main__":
    main()
