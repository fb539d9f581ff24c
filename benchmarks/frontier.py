"""Measures how close orders come to what no order undercuts (docs/inside/floors.md).

    python benchmarks/frontier.py floors [--json] [--cases 1000] [--first 0]
    python benchmarks/frontier.py phases | rules [--json] [--seconds 100] [--schedules zbv,dualpipe]
    python benchmarks/frontier.py tune [--json] [--seconds 30] [--seeds 1]
    python benchmarks/frontier.py pairs [--json] [--seconds 30] [--cases 100]
    python benchmarks/frontier.py torch | page [--json]

`floors`: random small problems. Each has the ops of a library schedule on 2 to 4 ranks, latency and random caps. Stages
have whole times and memory of their own. Backwards are split or not, and pairs are kept or dissolved. CP-SAT finds the
best order of each without the floor's help, as its search begins with no bound. A floor above it has failed.

Instrument: the solver's proof (status `optimal`). A problem without a proof within the effort is counted as undecided.

`phases`, `rules`: `benchmarks/frontier_rules.py` says what they measure. `phases` prints for each schedule how many
held-out orders its text gives. `failed` counts schedules with a wrong text. `tune`, `page`:
`benchmarks/frontier_commands.py` does; `pairs`: `benchmarks/frontier_pairs.py`; `torch`:
`benchmarks/frontier_torch.py`.

Printed by `floors`: cases, failed, undecided, on_floor (the best order's makespan is the floor), above_carlier (the
floor is above the bound of `schedc.search.bounds`), and the problems that failed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from frontier_commands import measured_page, measured_searches
from frontier_pairs import measured_pairs
from frontier_rules import SCHEDULES, measured_phases, measured_rules

from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.ir.schedule import Schedule
from schedc.search.bounds import OpWindows, combinatorial_bound
from schedc.search.floors import rank_floors
from schedc.search.greedy import serial_order
from schedc.search.problem import Freedom, problem_of
from schedc.search.solver import Effort, solve
from schedc.search.tune import with_cell_order
from schedc.step.costs.costs import Costs
from schedc.step.memory import measure_memory

SEEDS: tuple[tuple[str, dict[str, tuple[int, ...]]], ...] = (
    ("gpipe", {"P": (2, 3, 4), "M": (2, 3, 4, 5)}),
    ("1f1b_overlap", {"P": (2, 3), "M": (3, 4)}),
    ("zbv", {"P": (2, 3), "M": (2, 3, 4)}),
    ("looped_bfs", {"P": (2, 3), "M": (2, 3), "v": (2, 3)}),
    ("zb_wave_odd", {"P": (2,), "M": (2, 4), "w": (1,)}),
    ("hanayo", {"P": (2,), "M": (2, 4), "w": (1, 2)}),
    ("dualpipe", {"P": (2,), "M": (4, 6)}),
    ("dualpipev", {"P": (2,), "M": (4, 5)}),
    ("chimera", {"P": (2,), "M": (2, 4)}),
)
"""Names and sizes. The order of a seed only says what is kept: the pairs, and the sequence on each stage."""


@dataclass(frozen=True)
class FloorCase:
    """A problem whose best order is known. Times are in ticks of its grid; best: None where no proof was found."""

    name: str
    sizes: dict[str, int]
    costs: Costs
    caps: tuple[float, ...]
    floor: int
    carlier: int
    best: int | None


def random_case(number: int, effort: Effort) -> FloorCase:
    """The problem of this number, and its best order's makespan."""
    draw = Random(number)
    name, ranges = SEEDS[draw.randrange(len(SEEDS))]
    sizes = {size: draw.choice(values) for size, values in ranges.items()}
    seed = legal_schedule(open_input(name), sizes)
    costs = _random_costs(draw, seed.stages)
    freedom = Freedom(keep_pairs=draw.random() < 0.5, split=draw.random() < 0.6)
    caps = _random_caps(draw, seed, costs, freedom)
    problem = problem_of(seed, costs, caps, freedom)
    windows = OpWindows(problem)
    result = solve(windows, "makespan", 0, None, effort)
    best = None
    if result.status == "optimal" and result.start is not None:
        best = int((result.start + problem.duration).max())
    floor = max(each.makespan for each in rank_floors(windows))
    return FloorCase(name, sizes, costs, tuple(caps), floor, combinatorial_bound(windows, "makespan"), best)


def _random_costs(draw: Random, stages: int) -> Costs:
    """Whole times and memory, alike on all stages in every third case."""
    alike = draw.random() < 1 / 3

    def of_stages(values: tuple[float, ...]) -> tuple[float, ...]:
        return (draw.choice(values),) * stages if alike else tuple(draw.choice(values) for _ in range(stages))

    return Costs(
        F=of_stages((1, 2, 3)), I=of_stages((1, 2, 3)), W=of_stages((1, 2, 3)),
        FB=of_stages((4, 5)) if draw.random() < 0.3 else None, p2p=draw.choice((0, 0, 0.5, 1, 2)),
        activation=of_stages((1, 1, 2)), pending_weight=of_stages((1, 1, 0.5, 0, 2)),
    )  # fmt: skip


def _random_caps(draw: Random, seed: Schedule, costs: Costs, freedom: Freedom) -> np.ndarray:
    """[P] caps between what one microbatch after another takes and what the seed holds, or a little more."""
    problem = problem_of(seed, costs, None, freedom)
    serial = with_cell_order(problem, serial_order(OpWindows(problem)))
    least, peak = (measure_memory(schedule, costs).peak_memory for schedule in (serial, seed))
    share = draw.choice((0.0, 0.3, 0.6, 1.0, 1.2))
    return np.maximum(least, np.floor(least + share * (peak - least)))


def measured_torch() -> dict[str, Any]:
    """The figures of `torch`. Torch is loaded for this word alone."""
    from frontier_torch import measured_torch as measured

    return measured()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", choices=("floors", "phases", "rules", "tune", "pairs", "torch", "page"))
    parser.add_argument("--cases", type=int, help="random problems; 1000 for `floors`, 100 for `pairs`")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="most seconds for texts of one schedule, or 30 for a search"
    )
    parser.add_argument("--seeds", type=int, default=1, help="searches of each row of `tune`")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="names for `phases`, with commas")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    cases = options.cases or (100 if options.word == "pairs" else 1000)
    words: dict[str, Callable[[], dict[str, Any]]] = {
        "floors": lambda: measured_floors(range(options.first, options.first + cases), Effort(None, 5.0, workers=1)),
        "phases": lambda: measured_phases(options.schedules.split(","), options.seconds),
        "rules": lambda: measured_rules(options.seconds),
        "tune": lambda: measured_searches(min(options.seconds, 30.0), options.seeds),
        "pairs": lambda: measured_pairs(min(options.seconds, 30.0), cases, options.first),
        "torch": measured_torch,
        "page": measured_page,
    }
    facts = words[options.word]()
    print(json.dumps(facts) if options.json else "\n".join(f"{key}: {value}" for key, value in facts.items()))


def measured_floors(numbers: range, effort: Effort) -> dict[str, Any]:
    """The figures of the module's head for the problems of these numbers."""
    cases = [random_case(number, effort) for number in numbers]
    known = [(case, case.best) for case in cases if case.best is not None]
    failed = [case for case, best in known if case.floor > best]
    return {
        "cases": len(cases),
        "failed": len(failed),
        "undecided": len(cases) - len(known),
        "on_floor": sum(case.floor == best for case, best in known),
        "above_carlier": sum(case.floor > case.carlier for case in cases),
        "examples": [str(case) for case in failed[:5]],
    }


if __name__ == "__main__":
    main()
